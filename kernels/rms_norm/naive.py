"""Plain PyTorch twin of rms_norm."""

import torch


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x ** 2) + eps)` of every row, the mean in float32 as in Llama and Qwen2.

    Args:
        x: rows of shape `[N, C]`.
        weight: shape `[C]`.
        eps: added to the mean square.

    Returns:
        Shape `[N, C]`, in the dtype of `x`.

    Raises:
        ValueError: if the shapes do not agree.
    """
    check_rms_norm(x, weight)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def check_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise `ValueError` unless `x` is `[N, C]` and `weight` `[C]`."""
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x must be [N, C] and weight [C], got {tuple(x.shape)} and {tuple(weight.shape)}")
