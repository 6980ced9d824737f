"""Plain PyTorch twin of rope_sparse_attention: rope_append, then sparse_attention."""

import torch

from dustin_hf.kernels.rope_append.naive import naive_rope_append
from dustin_hf.kernels.sparse_attention.naive import naive_sparse_attention


def naive_rope_sparse_attention(
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
    indices: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """`naive_rope_append` of a block, then `naive_sparse_attention` of its queries. Source: ours.

    Args:
        qkv: projections of shape `[B, L, HQ + 2 * H, D]`; what is left in them is not defined.
        bias: of the projections, shape `[(HQ + 2 * H) * D]`, or None.
        q_norm: weights of the norm of each query head, shape `[D]`, or None.
        k_norm: the same of each key head.
        eps: of these norms.
        cos: of every position, shape `[P, D]`.
        sin: likewise.
        start: tokens before the block in each row, shape `[B]`, int, may be negative.
        keys: the cache, shape `[B, H, T, D]`, changed.
        values: likewise.
        indices: chosen slots of shape `[B, 1 or H, K]`, int32, each below `start[b]`, none twice; -1 is unused.
        scale: factor of the scores, usually `D ** -0.5`.

    Returns:
        Shape `[B, L, HQ, D]`, in the dtype of `qkv`.

    Raises:
        ValueError: if the shapes do not agree.
    """
    naive_rope_append(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values)
    q = qkv[:, :, : qkv.shape[2] - 2 * keys.shape[1]]
    return naive_sparse_attention(q, keys, values, indices, start, scale)[0]
