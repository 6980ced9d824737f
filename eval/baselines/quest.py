"""Quest: whole pages of the cache, ranked by a bound on their attention from minima and maxima of their keys."""

from functools import partial

import torch

from dustin_hf.selection import Selection, SelectionPolicy, Signals


class QuestPolicy(SelectionPolicy):
    """Pages by the upper bound of `q . k` over their keys (Quest, arXiv:2406.10774).

    Per layer and key/value head; layers 0 and 1 read everything (paper appendix C.3). The method has one query, and
    pages of its own for each query head. Here the queries of a block and the heads of a group read the same pages, by
    the mean of the shares that a softmax makes of their bounds, and the page that is being filled is always read
    (ours). The largest raw bound would let one head rule the others, and recovers less attention. Bounds are made anew
    from the keys in every step: right, and no measure of the method's speed.

    Args:
        k: slots in all, at least a page.
        scale: of the target's scores.
        page: slots of a page.
        dense_layers: first layers that read everything.
    """

    def __init__(self, k: int, scale: float, page: int = 16, dense_layers: int = 2):
        if k < page:
            raise ValueError(f"`budget` must hold a page of {page} slots for Quest, got {k}")
        self.k, self.scale, self.page, self.dense_layers = k, scale, page, dense_layers

    @property
    def signature(self) -> tuple:
        return (type(self).__name__, self.k, self.scale, self.page, self.dense_layers)

    def select(self, signals: Signals) -> Selection:
        return Selection(choose=partial(self._choose, signals.block_counts))

    def _choose(
        self, counts: torch.Tensor, layer: int, q: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor | None:
        if layer < self.dense_layers:
            return None
        bounds = bounds_of(q, *page_limits(keys, lengths, self.page)) * self.scale  # [B, H, L * G, pages]
        pages = torch.arange(bounds.shape[3], device=q.device)
        last = ((lengths - 1) // self.page)[:, None, None]
        shares = bounds.masked_fill(pages > last[..., None], float("-inf")).softmax(-1)
        queries = torch.arange(bounds.shape[2], device=q.device) // (q.shape[2] // keys.shape[1])
        idle = queries >= counts.to(q.device)[:, None]
        shares = shares.masked_fill(idle[:, None, :, None], 0.0).sum(2)
        shares = shares.masked_fill(pages == last, float("inf")).masked_fill(pages > last, float("-inf"))
        chosen = shares.topk(min(self.k // self.page, len(pages)), dim=-1).indices.sort(-1).values
        slots = (chosen[..., None] * self.page + torch.arange(self.page, device=q.device)).flatten(2)
        return slots.masked_fill(slots >= lengths[:, None, None], -1).int()


def page_limits(keys: torch.Tensor, lengths: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Minima and maxima of the committed keys of each page, `[B, H, pages, D]` each; 0 for a page without any.

    Args:
        keys: storage, `[B, H, T, D]`.
        lengths: committed tokens, `[B]`.
        page: slots of a page; the last one may be short.
    """
    batch, heads, slots, dim = keys.shape
    missing = -slots % page
    held = (torch.arange(slots + missing, device=keys.device) < lengths[:, None]).view(batch, 1, -1, page, 1)
    paged = torch.nn.functional.pad(keys, (0, 0, 0, missing)).view(batch, heads, -1, page, dim)
    low = paged.masked_fill(~held, float("inf")).amin(3)
    high = paged.masked_fill(~held, float("-inf")).amax(3)
    empty = ~held.any(3)
    return low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)


def bounds_of(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Largest `q . k` that any key between a page's minima and maxima could have, `[B, H, L * G, pages]` float32.

    Args:
        q: queries after rotary embedding, `[B, L, HQ, D]`; of a key/value head the `G = HQ // H` heads of its group.
        low: minima of pages, as from `page_limits`.
        high: maxima of pages.
    """
    batch, heads, _, dim = low.shape
    rows = q.float().view(batch, -1, heads, q.shape[2] // heads, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
    return rows.clamp(min=0) @ high.float().transpose(2, 3) + rows.clamp(max=0) @ low.float().transpose(2, 3)
