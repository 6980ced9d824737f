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
        self.kv_heads = {layer: torch.tensor(chosen) // group for layer, chosen in heads.items()}

    def __call__(
        self, queries: Queries, cache: DustinCache, lengths: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """Scores of every committed token.

        Args:
            queries: layer -> `[B, NQ, NH, D]` of the chosen heads, after rotary embedding.
            cache: the model's cache, read only.
            lengths: committed tokens of each row, `[B]`.
            counts: queries of each row that count, `[B]`.

        Returns:
            `[B, capacity]` float32, zero from `lengths[b]` on, on the device of `lengths`.
        """
        total = torch.zeros(len(lengths), cache.capacity, device=lengths.device)
        for layer, q in queries.items():
            keys = cache.layers[layer].keys
            at = keys.device
            scores = srh_score(q.to(at), keys, self.kv_heads[layer].to(at), lengths.to(at), counts.to(at), self.scale)
            total += scores.to(total.device)
        return total
