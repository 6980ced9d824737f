"""What the attention twins share: the argument checks; and masked dense attention, for the naive ones."""

import torch


def check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor) -> None:
    """Raise `ValueError` unless `q [B, L, HQ, D]`, `k` and `v` `[B, H, T, D]` and `start [B]` fit together."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape:
        raise ValueError(
            f"q must be [B, L, HQ, D] and k, v one shape [B, H, T, D], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[1]:
        raise ValueError(
            f"q {tuple(q.shape)} and k {tuple(k.shape)} must agree in B and D, and HQ must be a multiple of H"
        )
    if start.shape != q.shape[:1]:
        raise ValueError(f"start must have shape [B] = [{q.shape[0]}], got {tuple(start.shape)}")


def check_indices(indices: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> None:
    """Raise `ValueError` unless `indices` is `[B, 1 or H, K]`."""
    if indices.ndim != 3 or indices.shape[0] != q.shape[0] or indices.shape[1] not in (1, k.shape[1]):
        raise ValueError(
            f"indices must be [B, 1 or H, K] with B={q.shape[0]}, H={k.shape[1]}, got {tuple(indices.shape)}"
        )


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention `q [B, L, HQ, D]` over `k, v [B, H, T, D]` under a mask `visible [B, 1 or H, L, T]`.

    In float32 or wider whatever the dtype, also where the caller runs under autocast.
    """
    batch, new, q_heads, dim = q.shape
    heads = k.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(wide).view(batch, new, heads, q_heads // heads, dim).permute(0, 2, 3, 1, 4)  # [B, H, G, L, D]
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bhgld,bhtd->bhglt", grouped, k.to(wide)) * scale
        scores = scores.masked_fill(~visible[:, :, None], float("-inf"))
        lse = scores.logsumexp(-1)
        weights = (scores - lse.clamp(min=torch.finfo(lse.dtype).min)[..., None]).exp()
        o = torch.einsum("bhglt,bhtd->bhgld", weights, v.to(wide))
    o = o.permute(0, 3, 1, 2, 4).reshape(batch, new, q_heads, dim)
    return o.to(q.dtype), lse.permute(0, 3, 1, 2).reshape(batch, new, q_heads).float()
