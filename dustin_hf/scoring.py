"""SRH scores from stored queries (paper equation 5)."""

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.kernels.srh_score import srh_score
from dustin_hf.profile import Heads

Queries = dict[int, torch.Tensor]


class HeadScorer:
    """Sums the attention of chosen heads of one model over its cached tokens.

    Args:
        heads: layer -> query heads.
        group: query heads per key/value head (HQ // H).
        scale: factor of the attention scores of the model.
    """

    def __init__(self, heads: Heads, group: int, scale: float):
        self.heads = heads
        self.scale = scale
        self.group = group
        self._kv_heads: dict[tuple[int, torch.device], torch.Tensor] = {}

    def of(self, heads: Heads) -> "HeadScorer":
        """A scorer of other heads of the same model."""
        return HeadScorer(heads, self.group, self.scale)

    def kv_heads(self, layer: int, device: torch.device) -> torch.Tensor:
        """The key/value head of each chosen head, `[NH]`; copied to a device once, for a step copies nothing."""
        key = (layer, device)
        if key not in self._kv_heads:
            self._kv_heads[key] = torch.tensor(self.heads[layer], device=device) // self.group
        return self._kv_heads[key]

    def __call__(
        self, queries: Queries, cache: DustinCache, lengths: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Scores of every committed token.

        Args:
            queries: layer -> `[B, NQ, NH, D]` of the chosen heads, after rotary embedding; other layers are left out.
            cache: the model's cache, read only.
            lengths: committed tokens of each row, `[B]`.
            counts: queries of each row that count, `[B]`.

        Returns:
            `[B, capacity]` float32, zero from `lengths[b]` on, on the device of `lengths`.
        """
        total = torch.zeros(len(lengths), cache.capacity, dtype=torch.float32, device=lengths.device)
        for layer in self.heads:
            q, keys = queries[layer], cache.layers[layer].keys
            at = keys.device
            part = total if at == total.device else torch.zeros_like(total, device=at)
            srh_score(part, q.to(at), keys, self.kv_heads(layer, at), lengths.to(at), counts.to(at), self.scale)
            if part is not total:
                total += part.to(total.device)
        return total
