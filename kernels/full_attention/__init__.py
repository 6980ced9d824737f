"""full_attention: a few new queries of each row over the whole row."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_full_attention


def full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The Triton kernel on CUDA, else its twin; arguments and results as of `naive_full_attention`."""
    if runs_triton(q, k, v):
        from .kernel import full_attention_op

        return full_attention_op(q, k, v, start, scale)
    return naive_full_attention(q, k, v, start, scale)


__all__ = ["full_attention", "naive_full_attention"]
