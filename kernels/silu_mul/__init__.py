"""silu_mul: the gate of a Llama-like MLP."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_silu_mul


def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The Triton kernel on CUDA, else its twin; arguments and results as of `naive_silu_mul`."""
    if runs_triton(gate, up):
        from .kernel import silu_mul_op

        return silu_mul_op(gate, up)
    return naive_silu_mul(gate, up)


__all__ = ["naive_silu_mul", "silu_mul"]
