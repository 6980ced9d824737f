"""rope_sparse_attention: from the projections of a block to its attention over chosen slots, in one launch."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_rope_sparse_attention


def rope_sparse_attention(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """The Triton kernel on CUDA, else its twin; arguments and result as of `naive_rope_sparse_attention`."""
    args = (qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values, indices, scale)
    if runs_triton(qkv, keys):
        from .kernel import rope_sparse_attention_op

        return rope_sparse_attention_op(*args)
    return naive_rope_sparse_attention(*args)


__all__ = ["naive_rope_sparse_attention", "rope_sparse_attention"]
