"""What a replay holds for each policy, its lane, and the attention recovery rates of one window."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.profiling.recovery import windowed_arr
from dustin_hf.profiling.rows import attention_rows
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection, SelectionPolicy


@dataclass
class Lane:
    """The run of one policy. All lanes share a cache, which holds the contexts; each keeps its new tokens here.

    Args:
        policy: which.
        history: layer -> `[B, 1, NH, D]`, the run's queries of its last token.
        new: of each layer keys and values of the new tokens so far, `[B, n, H, D]` each.
        scores: of each window KL, sameness and NLL, `[B, L]`, and ARR in both readings, `[B]`.
    """

    policy: SelectionPolicy
    history: Queries
    new: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    scores: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def load(self, cache: DustinCache, contexts: Sequence[int]) -> None:
        """Write the lane's new tokens behind the contexts, over those of the lane before it.

        Args:
            cache: its storage is changed.
            contexts: tokens of each context.
        """
        for layer, (keys, values) in zip(cache.layers, self.new):
            start = torch.tensor(contexts, device=layer.keys.device)
            where = _slots(start, keys.shape[1])
            layer.keys[where], layer.values[where] = keys, values

    def keep(self, cache: DustinCache, start: torch.Tensor, count: int) -> None:
        """Take the `count` tokens that the lane has just written from slot `start[b]` on."""
        kept = []
        for i, layer in enumerate(cache.layers):
            where = _slots(start.to(layer.keys.device), count)
            new = layer.keys[where], layer.values[where]
            if self.new:
                new = torch.cat([self.new[i][0], new[0]], dim=1), torch.cat([self.new[i][1], new[1]], dim=1)
            kept.append(new)
        self.new = kept


def _slots(start: torch.Tensor, count: int) -> tuple[torch.Tensor, slice, torch.Tensor]:
    """Index of `count` slots of each row from `start[b]` on, into `[B, H, T, D]`; it gives `[B, count, H, D]`."""
    slots = start[:, None] + torch.arange(count, device=start.device)
    return torch.arange(len(slots), device=start.device)[:, None], slice(None), slots


def window_truth(
    queries: Queries, cache: DustinCache, counted: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a window's queries look over the full cache (A-bar of paper equation 3).

    Args:
        queries: layer -> `[B, L, HQ, D]`, of all heads.
        cache: holds the window's keys from slot `lengths[b]` on, not committed yet.
        counted: queries that count, `[B, L]`, bool.
        scale: factor of the attention scores.

    Returns:
        Attention on committed tokens, `[B, layers, T]` float32, zero from `lengths[b]` on, and on the window's own,
        `[B, layers]`: means over the heads of a layer and the queries that count; zero for a row without any.
    """
    device = cache.lengths.device
    truth = torch.zeros(len(counted), len(cache.layers), cache.capacity, device=device)
    new_mass = torch.zeros(truth.shape[:2], device=device)
    weights = counted / counted.sum(1, keepdim=True).clamp(min=1)
    for row, start in enumerate(cache.lengths.tolist()):
        for i, layer in enumerate(cache.layers):
            found = attention_rows(queries[i][row], layer.keys[row], start, scale)  # [HQ, L, start + L]
            mean = (weights[row].to(found.device) @ found.mean(0)).to(device)
            truth[row, i, :start] = mean[:start]
            new_mass[row, i] = mean[start:].sum()
    return truth, new_mass


def rates(
    truth: torch.Tensor, new_mass: torch.Tensor, selection: Selection, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windowed attention recovery rates of a selection (paper equations 1 and 2).

    Args:
        truth: as from `window_truth`.
        new_mass: likewise.
        selection: what the window attends to, besides itself.
        counted: queries that count, `[B, L]`, bool.

    Returns:
        ARR with the window's own tokens and over committed tokens alone, mean over layers, `[B]` each; NaN for a row
        of which nothing counts.

    Raises:
        ValueError: on a selection with sets for single heads, or one that layers make themselves.
    """
    if selection.choose is not None:
        raise ValueError("a replay measures sets that are chosen before a forward; layers of this policy choose in it")
    nothing = ~counted.any(1)
    indices = selection.indices
    if indices is None:
        everything = torch.ones_like(new_mass[:, 0]).masked_fill(nothing, torch.nan)
        return everything, everything
    if indices.shape[2] != 1:
        raise ValueError("a replay measures sets for whole layers; this policy chooses one for each key/value head")
    sets = selection.layer_sets or (0,) * truth.shape[1]
    slots = indices[list(sets), :, 0].transpose(0, 1)  # [B, layers, k]
    both = [windowed_arr(truth, new_mass, slots, with_new).mean(1) for with_new in (True, False)]
    return both[0].masked_fill(nothing, torch.nan), both[1].masked_fill(nothing, torch.nan)
