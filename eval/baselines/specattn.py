"""SpecAttn-style: a set for each target layer by the attention of all heads of a draft layer."""

import torch

from dustin_hf.kernels.topk_select import topk_select
from dustin_hf.profile import Heads
from dustin_hf.scoring import HeadScorer
from dustin_hf.selection import Selection, SelectionPolicy, Signals


class SpecAttnPolicy(SelectionPolicy):
    """Slots of each target layer by the draft's lookahead attention at the same depth (SpecAttn, arXiv:2510.27641).

    As the paper's appendix F has it: relevance per layer, from every layer and head of the draft, in place of a hybrid
    set for all layers. A target layer follows the draft layer at its share of the depth, and heads of a draft layer
    are summed, since heads of the two models do not correspond (ours). Sinks and window are protected as in Dustin. A
    row without lookahead (its last token) reads its most recent tokens.

    Args:
        k: slots in all.
        sinks, window: protected tokens, counted in `k`.
        target_layers: layers of the target.
        draft_heads: all heads of all draft layers.
        group: query heads for each key/value head of the draft.
        scale: of the draft's scores.
    """

    def __init__(
        self, k: int, sinks: int, window: int, target_layers: int, draft_heads: Heads, group: int, scale: float
    ):
        self.k, self.sinks, self.window, self.draft_heads = k, sinks, window, draft_heads
        depth = len(draft_heads)
        self.layers = tuple(layer * depth // target_layers for layer in range(target_layers))
        self.scorers = [HeadScorer({layer: heads}, group, scale) for layer, heads in sorted(draft_heads.items())]

    @property
    def signature(self) -> tuple:
        return (type(self).__name__, self.k, self.sinks, self.window, self.layers, tuple(self.draft_heads.items()))

    def select(self, signals: Signals) -> Selection:
        lengths, counts = signals.lengths, signals.draft_counts
        everything = torch.full_like(lengths, self.k)
        size = min(self.k, max(signals.target_cache.capacity, self.sinks + self.window))
        recent = torch.arange(signals.target_cache.capacity, dtype=torch.float32, device=lengths.device)
        sets = []
        for layer, scorer in enumerate(self.scorers):
            scores = recent.expand(len(lengths), -1)
            if signals.draft_queries:
                asked = {layer: signals.draft_queries[layer]}
                found = scorer(asked, signals.draft_cache, lengths, counts)[:, : len(recent)]
                scores = torch.where(counts[:, None] > 0, found, scores)
            scores = scores.contiguous()
            sets.append(topk_select(scores, scores, lengths, everything, self.sinks, self.window, size))
        return Selection(torch.stack(sets)[:, :, None], self.layers)
