"""rope_append: from the projections of a block to rotated queries, and to keys and values in the cache."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_rope_append


def rope_append(
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
) -> None:
    """The Triton kernel on CUDA, else its twin; arguments as of `naive_rope_append`."""
    if runs_triton(qkv, keys):
        from .kernel import rope_append_op

        return rope_append_op(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values)
    return naive_rope_append(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values)


__all__ = ["naive_rope_append", "rope_append"]
