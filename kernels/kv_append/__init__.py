"""kv_append: write the keys and values of new tokens into ragged cache rows."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_kv_append


def kv_append(keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> None:
    """The Triton kernel on CUDA, else its twin; arguments as of `naive_kv_append`."""
    if runs_triton(keys, values, k, v):
        from .kernel import kv_append_op

        return kv_append_op(keys, values, k, v, start)
    return naive_kv_append(keys, values, k, v, start)


__all__ = ["kv_append", "naive_kv_append"]
