"""Plain PyTorch twin of full_attention."""

import torch

from dustin_hf.kernels.naive_attention import check_attention, masked_attention


def naive_full_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `L` new tokens over everything before them in their row, and over themselves causally.

    Query `i` of row `b` sees slots `0 .. start[b] + i`. A query that sees no slot (possible only where `start[b]`
    is negative) gives zeros and `lse = -inf`. Source: ours; softmax in float32 or wider whatever the dtype.

    Args:
        q: queries of shape `[B, L, HQ, D]`.
        k: stored keys of shape `[B, H, T, D]`, the new tokens already written at `start[b] ..`.
        v: stored values of shape `[B, H, T, D]`.
        start: tokens before the new ones in each row, shape `[B]`, int.
        scale: factor of the scores, usually `D ** -0.5`.

    Returns:
        `o` of shape `[B, L, HQ, D]` in the dtype of `q`, and `lse` of shape `[B, L, HQ]`, float32.

    Raises:
        ValueError: if the shapes do not agree.
    """
    check_attention(q, k, v, start)
    last = start[:, None] + torch.arange(q.shape[1], device=q.device)  # [B, L]
    visible = torch.arange(k.shape[2], device=q.device) <= last[..., None]  # [B, L, T]
    return masked_attention(q, k, v, visible[:, None], scale)
