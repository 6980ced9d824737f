"""Attention recovery rates (paper equations 1 to 4) of sets of slots, and the sets that policies choose."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dustin_hf.drafting import streaming_slots
from dustin_hf.kernels.topk_select import topk_select

if TYPE_CHECKING:
    from dustin_hf.profiling.traces import Candidate, TraceSet, TraceSettings

# Means of attention are stored in float16 times this: 11 bits of precision from 1.5e-8 on, far below 1 / context.
SCALE = 4096.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The recorded windows of one text: `W` of them over `T` positions; one that starts early is zero at its end.

    Args:
        settings: of the recording.
        tensors: as stored (`windows.trace_samples`).
    """

    settings: "TraceSettings"
    tensors: Mapping[str, torch.Tensor]

    @property
    def lengths(self) -> torch.Tensor:
        """Committed tokens before each window, `[W]`."""
        return self.tensors["lengths"]

    @property
    def new_mass(self) -> torch.Tensor:
        """Attention of each target layer on the window's own tokens, mean over heads and queries, `[W, layers]`."""
        return self.tensors["new_mass"]

    def truth(self) -> torch.Tensor:
        """A-bar of paper equation 3 on committed positions, mean over the heads of a layer, `[W, layers, T]`."""
        return self.tensors["truth"].float() / SCALE

    def history(self, candidates: Iterable[int], delta: int = 1) -> torch.Tensor:
        """S_target of paper equation 5 by the query `delta` tokens before each window's start, `[W, T]`."""
        stored = self.tensors["history"][self.settings.deltas.index(delta)]
        return _summed(stored, candidates, self.settings.target, 1)

    def lookahead(self, candidates: Iterable[int]) -> torch.Tensor:
        """S_draft of paper equation 5, `[W, T]`."""
        return _summed(self.tensors["lookahead"], candidates, self.settings.draft, self.settings.window)


def _summed(
    stored: torch.Tensor, chosen: Iterable[int], candidates: tuple["Candidate", ...], queries: int
) -> torch.Tensor:
    total = torch.zeros(stored.shape[0], stored.shape[2], device=stored.device)
    for i in chosen:  # stored are means over heads and queries
        total += stored[:, i].float() * (len(candidates[i][1]) * queries / SCALE)
    return total


def windowed_arr(
    truth: torch.Tensor, new_mass: torch.Tensor, slots: torch.Tensor, include_new: bool = True
) -> torch.Tensor:
    """Windowed attention recovery rate of each layer (paper equations 1 and 2).

    Equation 2 averages equation 1 over a window; both are linear in the attention, so the mean over the window's
    queries (and over heads) may be taken first, which is what traces hold. Equation 1 does not say whether the
    window's own tokens, which verification always sees, belong to the valid positions. Both readings:

    - `include_new`: they do, and are always chosen: the share of all attention that verification sees.
    - otherwise they are left out of both sides: the share of the attention on committed tokens that is kept. (Of the
      means, so that a query that hardly looks at the committed tokens counts for little.)

    Args:
        truth: A-bar on committed positions, `[W, layers, T]`; each layer sums up to `1 - new_mass`.
        new_mass: attention on the window's own tokens, `[W, layers]`.
        slots: chosen positions, protected ones among them, -1 for unused places: `[W, k]`, one set for all layers, or
            `[W, layers, k]`.
        include_new: see above.

    Returns:
        `[W, layers]` float32.
    """
    if slots.ndim == 2:
        slots = slots[:, None].expand(-1, truth.shape[1], -1)
    kept = truth.gather(2, slots.clamp(min=0).long()).masked_fill(slots < 0, 0).sum(2)
    if include_new:
        return kept + new_mass
    return kept / (1 - new_mass).clamp(min=torch.finfo(torch.float32).tiny)


def hybrid_set(
    history: torch.Tensor,
    lookahead: torch.Tensor,
    lengths: torch.Tensor,
    k: int,
    m: int | torch.Tensor,
    sinks: int,
    window: int,
) -> torch.Tensor:
    """Sinks, window, top m by lookahead, the rest by history (paper equation 6), by the operator that runs online.

    Args:
        history: S_target of paper equation 5, `[W, T]`, not negative.
        lookahead: S_draft of it, `[W, T]`, not negative.
        lengths: committed tokens, `[W]`.
        k: slots in all.
        m: slots by lookahead, of all windows or each, `[W]`; what goes beyond `k - sinks - window` has no effect.
        sinks: protected tokens at the start.
        window: protected tokens at the end.

    Returns:
        `[W, k]` int32, ascending, -1 for unused places.
    """
    quota = m if isinstance(m, torch.Tensor) else torch.full_like(lengths, m)
    return topk_select(lookahead.contiguous(), history.contiguous(), lengths, quota, sinks, window, k)


def history_set(history: torch.Tensor, lengths: torch.Tensor, k: int, sinks: int, window: int) -> torch.Tensor:
    """`hybrid_set` by history alone (Dustin-T; paper section 3.2)."""
    return hybrid_set(history, history, lengths, k, 0, sinks, window)


def lookahead_set(lookahead: torch.Tensor, lengths: torch.Tensor, k: int, sinks: int, window: int) -> torch.Tensor:
    """`hybrid_set` by lookahead alone (Dustin-D; paper section 3.3)."""
    return hybrid_set(lookahead, lookahead, lengths, k, k, sinks, window)


def streaming_set(lengths: torch.Tensor, k: int, sinks: int) -> torch.Tensor:
    """The first `sinks` and the most recent `k - sinks` tokens (StreamingLLM; paper appendix C.3), `[W, k]` int32."""
    return streaming_slots(lengths, sinks, k)[0, :, 0]


def oracle_set(
    truth: torch.Tensor, lengths: torch.Tensor, k: int, *, per_layer: bool = False, sinks: int = 0, window: int = 0
) -> torch.Tensor:
    """The SD oracle (paper equation 3): the k slots with the most attention of the window to come.

    Args:
        truth: A-bar, `[W, layers, T]`.
        lengths: committed tokens, `[W]`.
        k: slots in all.
        per_layer: a set for each layer, else the best one for all: by the mean over layers.
        sinks: protected tokens at the start. The paper's oracle has none, so that it bounds every policy.
        window: protected tokens at the end.

    Returns:
        `[W, k]` or `[W, layers, k]` int32, -1 for unused places.
    """
    if not per_layer:
        return history_set(truth.mean(1), lengths, k, sinks, window)
    windows, layers, positions = truth.shape
    flat = truth.reshape(windows * layers, positions)
    return history_set(flat, lengths.repeat_interleave(layers), k, sinks, window).view(windows, layers, k)


@dataclass(frozen=True, slots=True)
class Prepared:
    """One sample, `W` windows: truth `[W, T]` and new mass `[W]`, means over the layers that count."""

    sample: Sample
    truth: torch.Tensor
    new_mass: torch.Tensor
    sinks: int
    window: int

    def arr(self, history: torch.Tensor, lookahead: torch.Tensor, k: int, m: int) -> float:
        """ARR of one hybrid set."""
        return self.arr_of(hybrid_set(history, lookahead, self.sample.lengths, k, m, self.sinks, self.window))

    def arr_of(self, slots: torch.Tensor) -> float:
        """ARR of a set for each window, `[W, k]`, the window's own tokens included."""
        return float(_arr_of(slots, self.truth, self.new_mass))

    def mean_arr(
        self, history: torch.Tensor, lookahead: torch.Tensor, splits: Mapping[int, Sequence[int]]
    ) -> torch.Tensor:
        """Mean over several m for each of some k; float64, not waited for on a GPU."""
        found = []
        for k, quotas in splits.items():
            truth, mass, past, to_come = (
                x.repeat(len(quotas), *[1] * (x.ndim - 1)) for x in (self.truth, self.new_mass, history, lookahead)
            )
            lengths = self.sample.lengths
            m = torch.tensor(quotas, device=lengths.device).repeat_interleave(len(lengths))
            slots = hybrid_set(past, to_come, lengths.repeat(len(quotas)), k, m, self.sinks, self.window)
            found.append(_arr_of(slots, truth, mass) * len(quotas))
        return torch.stack(found).sum() / sum(map(len, splits.values()))


def _arr_of(slots: torch.Tensor, truth: torch.Tensor, new_mass: torch.Tensor) -> torch.Tensor:
    """Mean of ARR over windows: of a set for each, `[W, k]`, truth `[W, T]` and new mass `[W]`."""
    kept = truth.gather(1, slots.clamp(min=0).long()).masked_fill(slots < 0, 0).sum(1)
    return (kept + new_mass).double().mean()


class Objective:
    """ARR of hybrid sets over samples (paper equation 2): mean over layers, windows, and then samples.

    Layers share one set and ARR is linear, so the truth is averaged over layers once. The attention of all heads
    counts, not only that of retrieval heads.

    Args:
        traces: recorded.
        numbers: samples that count; those without a window are left out.
        sinks: protected tokens at the start, counted in k.
        window: protected tokens at the end, counted in k.
        device: where sets are chosen.
        layers: target layers whose attention counts. Default: all.

    Attributes:
        longest: most committed tokens of any window.

    Raises:
        ValueError: if no sample has a window.
    """

    def __init__(
        self,
        traces: "TraceSet",
        numbers: Iterable[int],
        sinks: int,
        window: int,
        device: torch.device | str = "cpu",
        layers: Sequence[int] | None = None,
    ):
        self.traces, self.sinks, self.window, self.device = traces, sinks, window, device
        self.layers = slice(None) if layers is None else list(layers)
        # means over layers, by sample: read from its file once
        self.truths: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        lengths = {i: traces.sample(i).lengths for i in numbers}
        self.numbers = [i for i, found in lengths.items() if len(found)]
        if not self.numbers:
            raise ValueError(
                "no sample has a window, every continuation ended before one was full: take other texts, "
                "or a smaller `window`"
            )
        self.longest = max(int(lengths[i].max()) for i in self.numbers)

    def prepared(self, number: int) -> Prepared:
        """One sample with its truth averaged."""
        sample = self.traces.sample(number, self.device)
        if number not in self.truths:
            self.truths[number] = (
                sample.truth()[:, self.layers].mean(1),
                sample.new_mass[:, self.layers].mean(1),
            )
        return Prepared(sample, *self.truths[number], self.sinks, self.window)


def policy_tables(
    objective: Objective,
    target: Sequence[int],
    draft: Sequence[int],
    splits: Mapping[int, int],
    default: tuple[int, int, float],
) -> dict[str, dict[str, dict[str, Any]]]:
    """ARR of every policy with every budget: budget -> policy -> figures.

    These are `arr` and `arr_committed`, and of the former `arr_per_layer` and `arr_per_text`, in the objective's order.

    Args:
        objective: the samples.
        target: chosen target candidates.
        draft: chosen draft candidates.
        splits: m of each budget.
        default: target candidate, draft candidate and share of the profile of pairs that were never searched.
    """
    # of each policy [2, layers] for each sample
    found: dict[str, dict[str, list[torch.Tensor]]] = {str(k): {} for k in splits}
    for number in objective.numbers:
        sample = objective.traces.sample(number, objective.device)
        truth, lengths = sample.truth(), sample.lengths
        sinks, window = protected = objective.sinks, objective.window
        history, lookahead = sample.history(target), sample.lookahead(draft)
        stated = sample.history(default[:1]), sample.lookahead(default[1:2])
        for k, m in splits.items():
            sets = {
                "hybrid": hybrid_set(history, lookahead, lengths, k, m, *protected),
                "history": history_set(history, lengths, k, *protected),
                "lookahead": lookahead_set(lookahead, lengths, k, *protected),
                "streaming": streaming_set(lengths, k, sinks),
                "default": hybrid_set(*stated, lengths, k, round(default[2] * k), *protected),
                "oracle": oracle_set(truth, lengths, k),
                "oracle_per_layer": oracle_set(truth, lengths, k, per_layer=True),
            }
            for delta in sample.settings.deltas[1:]:
                sets[f"history_{delta}"] = history_set(sample.history(target, delta), lengths, k, sinks, window)
            for name, slots in sets.items():
                reached = [windowed_arr(truth, sample.new_mass, slots, new).double().mean(0) for new in (True, False)]
                found[str(k)].setdefault(name, []).append(torch.stack(reached).cpu())
    return {k: {name: _figures(torch.stack(rows)) for name, rows in table.items()} for k, table in found.items()}


def _figures(rows: torch.Tensor) -> dict[str, Any]:
    """Means of ARR in both readings, `[samples, 2, layers]`."""
    return {
        "arr": float(rows[:, 0].mean()),
        "arr_committed": float(rows[:, 1].mean()),
        "arr_per_layer": rows[:, 0].mean(0).tolist(),
        "arr_per_text": rows[:, 0].mean(1).tolist(),
    }
