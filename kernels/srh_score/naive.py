"""Plain PyTorch twin of srh_score."""

import torch


def naive_srh_score(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_heads: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Column sums of the attention of chosen heads, each query normalised over its row's committed tokens.

    `S[b, n] = sum over heads h and queries i < counts[b] of softmax(scale * q[b, i, h] . k[b, kv_heads[h], :])[n]`.
    Source: paper equation 5. The softmax runs over the `lengths[b]` committed tokens only (ours: drafts that
    may be rejected never enter a score).

    Args:
        q: queries of the chosen heads, shape `[B, NQ, NH, D]`.
        k: stored keys of shape `[B, H, T, D]`.
        kv_heads: key/value head of each chosen head, shape `[NH]`, int.
        lengths: committed tokens of each row, shape `[B]`, int.
        counts: queries of each row that count, shape `[B]`, int, 0 to NQ.
        scale: factor of the scores, usually `D ** -0.5`.

    Returns:
        Scores of shape `[B, T]`, float32; zero from `lengths[b]` on.

    Raises:
        ValueError: if the shapes do not agree.
    """
    check_srh_score(q, k, kv_heads, lengths, counts, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bqhd,bhtd->bqht", q.to(wide), k[:, kv_heads].to(wide)) * scale
    committed = torch.arange(k.shape[2], device=k.device) < lengths[:, None]  # [B, T]
    scores = scores.masked_fill(~committed[:, None, None], torch.finfo(torch.float32).min)
    counted = torch.arange(q.shape[1], device=q.device) < counts[:, None]  # [B, NQ]
    weights = scores.softmax(-1) * counted[:, :, None, None]
    return (weights.sum(dim=(1, 2)) * committed).float()


def check_srh_score(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_heads: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> None:
    """Raise `ValueError` on arguments of `srh_score` that do not fit together."""
    if q.ndim != 4 or k.ndim != 4 or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q must be [B, NQ, NH, D] and k [B, H, T, D], got {tuple(q.shape)} and {tuple(k.shape)}")
    if kv_heads.shape != q.shape[2:3] or lengths.shape != q.shape[:1] or counts.shape != q.shape[:1]:
        raise ValueError(
            f"kv_heads must be [NH], lengths and counts [B] for q {tuple(q.shape)}, "
            f"got {tuple(kv_heads.shape)}, {tuple(lengths.shape)} and {tuple(counts.shape)}"
        )
