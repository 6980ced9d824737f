"""Plain PyTorch twin of srh_score."""

import torch


def naive_srh_score(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    kv_heads: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> None:
    """Add column sums of the attention of chosen heads, each query normalised over its row's committed tokens.

    `out[b, n] += sum over heads h and queries i < counts[b] of softmax(scale * q[b, i, h] . k[b, kv_heads[h], :])[n]`.
    Source: paper equation 5. The softmax runs over the `lengths[b]` committed tokens only (ours: drafts that
    may be rejected never enter a score). In place, so that the layers of a model add up.

    Args:
        out: scores of shape `[B, T]`, float32, changed in place below `lengths[b]` and left alone from there on.
        q: queries of the chosen heads, shape `[B, NQ, NH, D]`.
        k: stored keys of shape `[B, H, T, D]`.
        kv_heads: key/value head of each chosen head, shape `[NH]`, int.
        lengths: committed tokens of each row, shape `[B]`, int.
        counts: queries of each row that count, shape `[B]`, int, 0 to NQ.
        scale: factor of the scores, usually `D ** -0.5`.

    Raises:
        ValueError: if the shapes do not agree, or `out` is not float32.
    """
    check_srh_score(out, q, k, kv_heads, lengths, counts, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        scores = torch.einsum("bqhd,bhtd->bqht", q.to(wide), k[:, kv_heads].to(wide)) * scale
    committed = torch.arange(k.shape[2], device=k.device) < lengths[:, None]  # [B, T]
    scores = scores.masked_fill(~committed[:, None, None], torch.finfo(torch.float32).min)
    counted = torch.arange(q.shape[1], device=q.device) < counts[:, None]  # [B, NQ]
    weights = scores.softmax(-1) * counted[:, :, None, None]
    out.copy_(torch.where(committed, out + weights.sum(dim=(1, 2)).float(), out))


def check_srh_score(
    out: torch.Tensor,
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
    if out.shape != (k.shape[0], k.shape[2]) or out.dtype != torch.float32:
        raise ValueError(
            f"out must be float32 [B, T] = [{k.shape[0]}, {k.shape[2]}], got {out.dtype} {tuple(out.shape)}"
        )
