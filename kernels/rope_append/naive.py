"""Plain PyTorch twin of rope_append."""

import torch

from dustin_hf.kernels.kv_append.naive import naive_kv_append
from dustin_hf.kernels.rms_norm.naive import naive_rms_norm


def naive_rope_append(
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
    """Add the bias, normalise heads (Qwen3), rotate queries and keys, and write keys and values into the cache.

    The queries are left rotated in `qkv`; token `i` of row `b` stands at position `start[b] + i`, and its key and
    value go to that slot unless it is negative or outside the storage.

    Args:
        qkv: projections of shape `[B, L, HQ + 2 * H, D]`, changed in place: queries, keys, values.
        bias: of the projections, shape `[(HQ + 2 * H) * D]`, or None.
        q_norm: weights of the norm of each query head, shape `[D]`, or None.
        k_norm: the same of each key head.
        eps: of these norms.
        cos: of every position, shape `[P, D]`, P at least the largest position and 1.
        sin: likewise.
        start: tokens before the block in each row, shape `[B]`, int, may be negative.
        keys: the cache, shape `[B, H, T, D]`, changed.
        values: likewise.

    Raises:
        ValueError: if the shapes do not agree.
    """
    check_rope_append(qkv, bias, cos, sin, start, keys, values)
    batch, new, _, dim = qkv.shape
    heads = keys.shape[1]
    if bias is not None:
        qkv += bias.view(-1, dim)
    q, k, v = qkv.split([qkv.shape[2] - 2 * heads, heads, heads], dim=2)
    positions = (start[:, None] + torch.arange(new, device=qkv.device)).clamp(0, len(cos) - 1)
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            x.copy_(naive_rms_norm(x.reshape(-1, dim), weight, eps).view(x.shape))
        rotated = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], dim=-1)
        x.copy_(x * cos[positions][:, :, None] + rotated * sin[positions][:, :, None])
    naive_kv_append(keys, values, k.transpose(1, 2), v.transpose(1, 2), start)


def check_rope_append(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Raise `ValueError` on arguments of `rope_append` that do not fit together."""
    if qkv.ndim != 4 or keys.ndim != 4 or keys.shape != values.shape or qkv.shape[3] != keys.shape[3]:
        raise ValueError(
            f"qkv must be [B, L, HQ + 2 * H, D] and keys, values one shape [B, H, T, D], "
            f"got {tuple(qkv.shape)}, {tuple(keys.shape)} and {tuple(values.shape)}"
        )
    batch, _, heads, dim = qkv.shape
    if keys.shape[0] != batch or start.shape != (batch,) or heads <= 2 * keys.shape[1]:
        raise ValueError(
            f"qkv {tuple(qkv.shape)}, keys {tuple(keys.shape)} and start {tuple(start.shape)} must agree in B and heads"
        )
    if cos.shape != sin.shape or cos.ndim != 2 or cos.shape[1] != dim or dim % 2:
        raise ValueError(f"cos and sin must be one shape [P, {dim}], got {tuple(cos.shape)} and {tuple(sin.shape)}")
    if bias is not None and bias.shape != (heads * dim,):
        raise ValueError(f"bias must be [{heads * dim}], got {tuple(bias.shape)}")
