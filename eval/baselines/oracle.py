"""The oracle of a run: each layer reads the slots that its own queries attend to most."""

from functools import partial

import torch

from dustin_hf.kernels.srh_score import srh_score
from dustin_hf.kernels.topk_select import topk_select
from dustin_hf.selection import Selection, SelectionPolicy, Signals


class OraclePolicy(SelectionPolicy):
    """The slots with the most attention of the block's own queries, a set for each layer (paper equation 3).

    It reads all keys to know them, so it bounds quality and saves nothing. The paper's oracle knows the attention of
    the full cache's run; this one that of the sparse run it is part of.

    Args:
        k: slots in all.
        scale: of the target's scores.
    """

    def __init__(self, k: int, scale: float):
        self.k, self.scale = k, scale

    @property
    def signature(self) -> tuple:
        return (type(self).__name__, self.k, self.scale)

    def select(self, signals: Signals) -> Selection:
        return Selection(choose=partial(self._choose, signals.block_counts))

    def _choose(
        self, counts: torch.Tensor, layer: int, q: torch.Tensor, keys: torch.Tensor, lengths: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.zeros(len(q), keys.shape[2], dtype=torch.float32, device=q.device)
        kv_heads = torch.arange(q.shape[2], device=q.device) // (q.shape[2] // keys.shape[1])
        srh_score(scores, q, keys, kv_heads, lengths, counts.to(q.device), self.scale)
        nothing = torch.zeros_like(lengths)
        return topk_select(scores, scores, lengths, nothing, 0, 0, min(self.k, keys.shape[2]))[:, None]
