"""Plain PyTorch twin of sparse_attention."""

import torch

from dustin_hf.kernels.naive_attention import check_attention, check_indices, masked_attention


def naive_sparse_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, start: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `L` new tokens over the chosen slots of their row, and over themselves causally.

    Query `i` of row `b` sees the slots `indices[b]` and the new tokens at `start[b] .. start[b] + i`.
    A query that sees no slot gives zeros and `lse = -inf`. Source: paper section 4.1 (verification over I_verify);
    the new tokens come on top of the budget.

    Args:
        q: queries of shape `[B, L, HQ, D]`.
        k: stored keys of shape `[B, H, T, D]`, the new tokens already written at `start[b] ..`.
        v: stored values of shape `[B, H, T, D]`.
        indices: chosen slots of shape `[B, 1 or H, K]`, int32, each below `start[b]`, none twice; -1 is unused.
        start: tokens before the new ones in each row, shape `[B]`, int, may be negative.
        scale: factor of the scores, usually `D ** -0.5`.

    Returns:
        `o` of shape `[B, L, HQ, D]` in the dtype of `q`, and `lse` of shape `[B, L, HQ]`, float32.

    Raises:
        ValueError: if the shapes do not agree.
    """
    check_attention(q, k, v, start)
    check_indices(indices, q, k)
    batch, new = q.shape[:2]
    own = start[:, None] + torch.arange(new, device=q.device)  # [B, L]
    slots = torch.cat([indices.long(), own[:, None].expand(-1, indices.shape[1], -1)], dim=2)  # [B, 1 or H, K + L]
    visible = (slots[:, :, None] >= 0) & (slots[:, :, None] <= own[:, None, :, None])  # [B, 1 or H, L, K + L]
    gather = slots.clamp(min=0)[..., None].expand(-1, k.shape[1], -1, k.shape[3])
    return masked_attention(q, k.gather(2, gather), v.gather(2, gather), visible, scale)
