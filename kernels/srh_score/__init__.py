"""srh_score: how much attention a few chosen heads put on each committed token."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_srh_score


def srh_score(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_heads: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The Triton kernel on CUDA, else its twin; arguments and results as of `naive_srh_score`."""
    if runs_triton(q, k):
        from .kernel import srh_score_op

        return srh_score_op(q, k, kv_heads, lengths, counts, scale)
    return naive_srh_score(q, k, kv_heads, lengths, counts, scale)


__all__ = ["naive_srh_score", "srh_score"]
