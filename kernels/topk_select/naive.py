"""Plain PyTorch twin of topk_select."""

import torch


def naive_topk_select(
    draft_scores: torch.Tensor,
    target_scores: torch.Tensor,
    lengths: torch.Tensor,
    draft_quota: torch.Tensor,
    sinks: int,
    window: int,
    k: int,
) -> torch.Tensor:
    """Choose at most `k` committed slots of each row in three tiers.

    The first `sinks` and the last `window` tokens of the row are protected and count in `k`; then come the
    `draft_quota[b]` best of the rest by `draft_scores`; then the best of what is left by `target_scores`, until `k`
    is reached. A row of at most `k` tokens is chosen whole. Equal scores are taken from the left.
    Source: paper equation 6.

    Args:
        draft_scores: shape `[B, T]`, float.
        target_scores: shape `[B, T]`, float.
        lengths: committed tokens of each row, shape `[B]`, int.
        draft_quota: `m` of each row, shape `[B]`, int.
        sinks: protected tokens at the start of the row.
        window: protected tokens at the end of the row.
        k: slots of each row, at least `sinks + window`.

    Returns:
        Slots of shape `[B, k]`, int32, ascending, unused places -1 at the end.

    Raises:
        ValueError: if the shapes do not agree, or `k` is below `sinks + window`.
    """
    check_topk_select(draft_scores, target_scores, lengths, draft_quota, sinks, window, k)
    slots = torch.arange(draft_scores.shape[1], device=draft_scores.device)
    committed = slots < lengths[:, None]  # [B, T]
    chosen = committed & ((slots < sinks) | (slots >= lengths[:, None] - window))
    for scores, quota in ((draft_scores, draft_quota), (target_scores, torch.full_like(draft_quota, k))):
        room = torch.minimum(quota, k - chosen.sum(-1))
        ranked = scores.float().masked_fill(~committed | chosen, float("-inf"))
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(1, order, slots.expand_as(order))
        chosen = chosen | (committed & ~chosen & (rank < room[:, None]))
    picked = torch.where(chosen, slots, draft_scores.shape[1]).sort(dim=-1).values[:, :k]
    picked = torch.where(picked < draft_scores.shape[1], picked, -1)
    return torch.nn.functional.pad(picked, (0, k - picked.shape[1]), value=-1).int()


def check_topk_select(
    draft_scores: torch.Tensor,
    target_scores: torch.Tensor,
    lengths: torch.Tensor,
    draft_quota: torch.Tensor,
    sinks: int,
    window: int,
    k: int,
) -> None:
    """Raise `ValueError` on arguments of `topk_select` that do not fit together."""
    if draft_scores.ndim != 2 or draft_scores.shape != target_scores.shape:
        raise ValueError(
            f"draft_scores and target_scores must be one shape [B, T], "
            f"got {tuple(draft_scores.shape)} and {tuple(target_scores.shape)}"
        )
    if lengths.shape != draft_scores.shape[:1] or draft_quota.shape != lengths.shape:
        raise ValueError(
            f"lengths and draft_quota must be [B] = [{draft_scores.shape[0]}], "
            f"got {tuple(lengths.shape)} and {tuple(draft_quota.shape)}"
        )
    if k < sinks + window:
        raise ValueError(f"k must hold the protected tokens, {sinks} sinks + {window} window, got {k}")
