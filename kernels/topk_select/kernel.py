"""Triton kernel of topk_select: a program per row finds each tier's threshold bit by bit, then packs the slots."""

import torch
import triton
import triton.language as tl

from .naive import check_topk_select


@triton.jit
def _take(keys, quota):
    """Mark the `quota` largest of the keys that are not negative; equal keys from the left."""
    eligible = tl.sum((keys >= 0).to(tl.int32), 0)
    quota = tl.minimum(quota, eligible)
    # the largest threshold that at least `quota` keys reach; positive floats order as their bits do
    threshold = 0
    for i in range(31):
        candidate = threshold | (1 << (30 - i))
        reached = tl.sum((keys >= candidate).to(tl.int32), 0)
        threshold = tl.where(reached >= quota, candidate, threshold)
    above = keys > threshold
    level = keys == threshold
    missing = quota - tl.sum(above.to(tl.int32), 0)
    return above | (level & (tl.cumsum(level.to(tl.int32), 0) <= missing))


@triton.jit
def _topk_select_kernel(
    p_draft, p_target, p_lengths, p_quota, p_out, s_draft, s_target, sinks, window, k,
    BT: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    length = tl.load(p_lengths + i_b).to(tl.int32)
    slots = tl.arange(0, BT)
    held = slots < length
    chosen = held & ((slots < sinks) | (slots >= length - window))
    room = k - tl.sum(chosen.to(tl.int32), 0)
    draft = tl.load(p_draft + i_b * s_draft + slots, mask=held, other=0.0).to(tl.int32, bitcast=True)
    quota = tl.minimum(tl.load(p_quota + i_b).to(tl.int32), room)
    chosen = chosen | _take(tl.where(held & (chosen == 0), draft, -1), quota)
    room = k - tl.sum(chosen.to(tl.int32), 0)
    target = tl.load(p_target + i_b * s_target + slots, mask=held, other=0.0).to(tl.int32, bitcast=True)
    chosen = chosen | _take(tl.where(held & (chosen == 0), target, -1), room)

    count = chosen.to(tl.int32)
    place = tl.cumsum(count, 0) - 1
    tl.store(p_out + i_b * k + place, slots, mask=chosen)
    rest = tl.arange(0, BK)
    tl.store(p_out + i_b * k + rest, -1, mask=(rest < k) & (rest >= tl.sum(count, 0)))


def triton_topk_select(
    draft_scores: torch.Tensor,
    target_scores: torch.Tensor,
    lengths: torch.Tensor,
    draft_quota: torch.Tensor,
    sinks: int,
    window: int,
    k: int,
) -> torch.Tensor:
    """As `naive_topk_select`, for scores that are not negative, as sums of softmaxes are."""
    check_topk_select(draft_scores, target_scores, lengths, draft_quota, sinks, window, k)
    batch, slots = draft_scores.shape
    out = torch.empty(batch, k, dtype=torch.int32, device=draft_scores.device)
    padded = triton.next_power_of_2(slots)
    with torch.cuda.device_of(draft_scores):
        _topk_select_kernel[(batch,)](
            draft_scores, target_scores, lengths, draft_quota, out, draft_scores.stride(0), target_scores.stride(0),
            sinks, window, k,
            BT=padded, BK=triton.next_power_of_2(k), num_warps=min(32, max(4, padded // 1024)),
        )  # fmt: skip
    return out


topk_select_op = torch.library.custom_op("dustin_hf::topk_select", triton_topk_select, mutates_args=())


@topk_select_op.register_fake
def _(draft_scores, target_scores, lengths, draft_quota, sinks, window, k):
    return lengths.new_empty(len(lengths), k, dtype=torch.int32)
