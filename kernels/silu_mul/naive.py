"""Plain PyTorch twin of silu_mul."""

import torch


def naive_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, both of shape `[N, C]`, which may be halves of one tensor.

    Returns:
        Shape `[N, C]`, contiguous, in the dtype of `gate`.

    Raises:
        ValueError: if the shapes differ.
    """
    check_silu_mul(gate, up)
    return torch.nn.functional.silu(gate) * up


def check_silu_mul(gate: torch.Tensor, up: torch.Tensor) -> None:
    """Raise `ValueError` unless both are `[N, C]`."""
    if gate.ndim != 2 or gate.shape != up.shape:
        raise ValueError(f"gate and up must be one shape [N, C], got {tuple(gate.shape)} and {tuple(up.shape)}")
