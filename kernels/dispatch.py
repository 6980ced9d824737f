"""Which twin of an op runs: the Triton kernel on CUDA tensors it can serve, else plain PyTorch."""

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def runs_triton(*tensors: torch.Tensor) -> bool:
    """Whether the op's kernel takes these: all on CUDA, floats of one of the dtypes kernels are tested in."""
    return all(x.is_cuda and (not x.is_floating_point() or x.dtype in _DTYPES) for x in tensors) and _has_triton()


def twin(naive: F, kernel: Callable[[], Callable[..., Any]]) -> F:
    """The op that `naive` describes: its Triton kernel where `runs_triton`, else `naive` itself.

    Args:
        naive: plain PyTorch; takes positional arguments.
        kernel: imports the custom op, so that nothing needs Triton until it is used.
    """

    @wraps(naive)
    def op(*args: Any) -> Any:
        if runs_triton(*[x for x in args if isinstance(x, torch.Tensor)]):
            return kernel()(*args)
        return naive(*args)

    return cast(F, op)


def custom_op(naive: Callable[..., Any], launch: Callable[..., Any], *, changes: tuple[str, ...] = ()) -> Any:
    """Register a launcher as `dustin_hf::<op>`, under the signature of its plain twin.

    Args:
        naive: the twin, `naive_<op>`.
        launch: takes the same arguments.
        changes: those that are changed in place.
    """
    name = naive.__name__.removeprefix("naive_")
    schema = torch.library.infer_schema(naive, mutates_args=changes)
    return torch.library.custom_op(f"dustin_hf::{name}", launch, mutates_args=changes, schema=schema)
