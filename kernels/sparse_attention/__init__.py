"""sparse_attention: a few new queries of each row over chosen slots of the row."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_sparse_attention


def sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, start: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton kernel on CUDA, else its twin; arguments and results as of `naive_sparse_attention`."""
    if runs_triton(q, k, v):
        from .kernel import sparse_attention_op

        return sparse_attention_op(q, k, v, indices, start, scale)
    return naive_sparse_attention(q, k, v, indices, start, scale)


__all__ = ["naive_sparse_attention", "sparse_attention"]
