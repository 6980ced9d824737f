"""StreamingLLM: sinks and the most recent tokens."""

from dustin_hf.drafting import streaming_slots
from dustin_hf.selection import Selection, SelectionPolicy, Signals


class StreamingPolicy(SelectionPolicy):
    """Sinks and the most recent tokens (StreamingLLM, arXiv:2309.17453; as configured in paper appendix C.3).

    The original evicts the others and counts positions within its cache; here, as in the paper, they only go unread.

    Args:
        k: slots in all.
        sinks: first tokens of each row, counted in `k`.
    """

    def __init__(self, k: int, sinks: int):
        self.k, self.sinks = k, sinks

    @property
    def signature(self) -> tuple:
        return (type(self).__name__, self.k, self.sinks)

    def select(self, signals: Signals) -> Selection:
        size = min(self.k, max(signals.target_cache.capacity, self.sinks + 1))
        return Selection(streaming_slots(signals.lengths, self.sinks, size))
