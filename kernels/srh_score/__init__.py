"""srh_score: how much attention a few chosen heads put on each committed token."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_srh_score


def srh_score(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    kv_heads: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> None:
    """The Triton kernel on CUDA, else its twin; arguments as of `naive_srh_score`."""
    if runs_triton(out, q, k):
        from .kernel import srh_score_op

        return srh_score_op(out, q, k, kv_heads, lengths, counts, scale)
    return naive_srh_score(out, q, k, kv_heads, lengths, counts, scale)


__all__ = ["naive_srh_score", "srh_score"]
