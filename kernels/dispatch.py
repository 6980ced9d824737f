"""Which twin of an op runs: the Triton kernel on CUDA tensors it can serve, else plain PyTorch."""

from functools import cache
from importlib.util import find_spec

import torch

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(*tensors: torch.Tensor) -> bool:
    """Whether the op's kernel takes these: all on CUDA, floats of one of the dtypes kernels are tested in."""
    return all(x.is_cuda and (not x.is_floating_point() or x.dtype in _DTYPES) for x in tensors) and _has_triton()
