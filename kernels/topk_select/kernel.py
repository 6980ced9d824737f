"""Triton kernels of topk_select: bounds from group maxima leave few candidates, among which a program per row selects.

Slot `s` is in group `s % NG`, and NG is `2 * k` or more, `MOST` at most. The q-th largest of the groups' maxima is at
most the q-th largest key, so no selected slot lies below it; where large keys lie in any order, less than twice as many
slots as are selected lie above. A row that keeps more than fit (equal keys; a period of NG slots) is searched whole,
which is slow.
"""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op

from .naive import check_topk_select, naive_topk_select

# Maxima: groups of a program, slots of each group that it reads at a time.
GROUPS, DEPTH, MAXIMA_WARPS = 64, 32, 4
# Candidates: a row is read by up to CHUNKS programs, TILE slots at a time.
CHUNKS, TILE, CANDIDATES_WARPS = 32, 2048, 4
SELECT_WARPS = 8
# Beyond it a program's tile of candidates and chunks is larger than Triton allows, and torch sorts.
MOST = 8192
# Bits of a threshold that each round of a search finds, by counting the keys that reach each of 2 ** BITS values.
BITS = 2

# keys are the bits of scores that are not negative, which order as the scores do
_PROTECTED = tl.constexpr(0x7F800001)  # above infinity
_LARGEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _keys(p_scores, slots, length, sinks, window):
    """The bits of the slots' scores, more than any for protected slots, -1 from `length` on."""
    held = slots < length
    bits = tl.load(p_scores + slots, mask=held, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
    bits = tl.where((slots < sinks) | (slots >= length - window), _PROTECTED, bits)
    return tl.where(held, bits, -1)


@triton.jit
def _draft_quota(length, quota, sinks, window, k):
    """What the draft's tier takes with the protected slots, which have the largest keys there."""
    return tl.minimum(tl.minimum(length, sinks + window) + tl.maximum(quota, 0), k)


@triton.jit
def _levels(keys, quota, most, S: tl.constexpr, BITS: tl.constexpr):
    """For each row of `keys [S, N]` a value that `quota` to `most` reach, else the largest that more do, else 0."""
    levels = tl.zeros([S], tl.int32)
    digits = tl.arange(0, 1 << BITS)
    shift, wide = tl.full([], 31, tl.int32), tl.full([], 1, tl.int32)
    while (shift > 0) & (wide > 0):
        # the next bits; the last digit may overlap the one before, which it cannot change any more
        shift = tl.maximum(shift - BITS, 0)
        steps = levels[:, None] + (digits << shift)[None, :]
        reached = tl.sum((keys[:, None, :] >= steps[:, :, None]).to(tl.int32), 2)  # [S, digits]
        enough = reached >= quota[:, None]
        levels += tl.max(tl.where(enough, digits[None, :], 0), 1) << shift
        wide = tl.sum((tl.min(tl.where(enough, reached, _LARGEST), 1) > most).to(tl.int32), 0)
    return levels


@triton.jit
def _row_level(p_scores, length, sinks, window, quota, BN: tl.constexpr):
    """The largest value that at least `quota` keys of a whole row reach, 0 if none is."""
    level = tl.full([], 0, tl.int32)
    for i in range(31):
        step = level | (1 << (30 - i))
        reached = tl.full([], 0, tl.int32)
        for n in range(0, length, BN):
            keys = _keys(p_scores, n + tl.arange(0, BN), length, sinks, window)
            reached += tl.sum((keys >= step).to(tl.int32), 0)
        level = tl.where(reached >= quota, step, level)
    return level


@triton.jit
def _reach(keys, level, quota, before):
    """Mark the keys above `level`, and equal ones from the left, up to `quota` of them with `before` earlier ones."""
    same = (keys == level).to(tl.int32)
    return (keys > level) | ((same != 0) & (before + tl.cumsum(same, 0) <= quota)), before + tl.sum(same, 0)


@triton.jit
def _take(keys, quota, BITS: tl.constexpr):
    """Mark the `quota` largest of the keys that are not negative; equal keys from the left."""
    wanted = tl.maximum(quota, 1) + tl.zeros([1], tl.int32)
    level = tl.where(quota > 0, tl.sum(_levels(keys[None, :], wanted, wanted, 1, BITS), 0), _LARGEST)
    return _reach(keys, level, quota, tl.sum((keys > level).to(tl.int32), 0))[0]


@triton.jit
def _pack(
    p_draft, p_target, p_slots, begin, end, length, sinks, window, draft_level, target_level, draft_quota, k,
    EXACT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Write the slots from `begin` that reach a level, ascending; with `EXACT`, of equal keys what a tier can take."""
    total = tl.full([], 0, tl.int32)
    draft_before, target_before = total, total
    for n in range(begin, end, BN):
        slots = n + tl.arange(0, BN)
        draft = _keys(p_draft, slots, length, sinks, window)
        target = _keys(p_target, slots, length, sinks, window)
        if EXACT:
            in_draft, draft_before = _reach(draft, draft_level, draft_quota, draft_before)
            in_target, target_before = _reach(target, target_level, k, target_before)
        else:
            in_draft, in_target = draft >= draft_level, target >= target_level
        kept = (in_draft | in_target).to(tl.int32)
        tl.store(p_slots + total + tl.cumsum(kept, 0) - 1, slots, mask=kept != 0)
        total += tl.sum(kept, 0)
    return total


@triton.jit
def _maxima_kernel(
    p_draft, p_target, p_lengths, p_maxima, s_draft, s_target, sinks, window,
    NG: tl.constexpr, BG: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(1).to(tl.int64)
    length = tl.load(p_lengths + i_b).to(tl.int32)
    groups = tl.program_id(0) * BG + tl.arange(0, BG)
    draft, target = tl.full([BG], -1, tl.int32), tl.full([BG], -1, tl.int32)
    for n in range(0, length, BN * NG):
        slots = n + tl.arange(0, BN)[:, None] * NG + groups[None, :]
        draft = tl.maximum(draft, tl.max(_keys(p_draft + i_b * s_draft, slots, length, sinks, window), 0))
        target = tl.maximum(target, tl.max(_keys(p_target + i_b * s_target, slots, length, sinks, window), 0))
    tl.store(p_maxima + i_b * 2 * NG + groups, draft)
    tl.store(p_maxima + i_b * 2 * NG + NG + groups, target)


@triton.jit
def _candidates_kernel(
    p_draft, p_target, p_lengths, p_quota, p_maxima, p_slots, p_counts, s_draft, s_target, width, chunk,
    sinks, window, k,
    NG: tl.constexpr, CHUNKS: tl.constexpr, BN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    length, quota = tl.load(p_lengths + i_b).to(tl.int32), tl.load(p_quota + i_b).to(tl.int32)
    begin = i_n * chunk
    if begin >= length:
        tl.store(p_counts + i_b * CHUNKS + i_n, 0)
        return
    tiers = tl.arange(0, 2)
    maxima = tl.load(p_maxima + (i_b * 2 + tiers)[:, None] * NG + tl.arange(0, NG)[None, :])
    draft_quota = _draft_quota(length, quota, sinks, window, k)
    quotas = tl.where(tiers == 0, tl.maximum(draft_quota, 1), k)
    # a bound need not be tight: some more candidates cost less than more rounds
    levels = _levels(maxima, quotas, quotas + quotas // 8, 2, BITS)
    draft_level = tl.where(quota > 0, tl.sum(tl.where(tiers == 0, levels, 0), 0), _PROTECTED)
    target_level = tl.sum(tl.where(tiers == 1, levels, 0), 0)
    total = _pack(
        p_draft + i_b * s_draft, p_target + i_b * s_target, p_slots + i_b * width + begin,
        begin, tl.minimum(begin + chunk, length), length, sinks, window,
        draft_level, target_level, draft_quota, k, False, BN,
    )  # fmt: skip
    tl.store(p_counts + i_b * CHUNKS + i_n, total)


@triton.jit
def _select_kernel(
    p_draft, p_target, p_lengths, p_quota, p_slots, p_counts, p_out, s_draft, s_target, width, chunk,
    n_chunks, sinks, window, k,
    CHUNKS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    length, quota = tl.load(p_lengths + i_b).to(tl.int32), tl.load(p_quota + i_b).to(tl.int32)
    p_draft += i_b * s_draft
    p_target += i_b * s_target
    p_slots += i_b * width
    draft_quota = _draft_quota(length, quota, sinks, window, k)
    chunks, places = tl.arange(0, CHUNKS), tl.arange(0, BC)
    counts = tl.load(p_counts + i_b * CHUNKS + chunks, mask=chunks < n_chunks, other=0)
    total = tl.sum(counts, 0)
    if total <= BC:
        # the place of a candidate among all tells its chunk: as many chunks as end before it
        ended = tl.cumsum(counts, 0)[:, None] <= places[None, :]
        at = tl.sum(tl.where(ended, chunk - counts[:, None], 0), 0) + places
    else:
        draft_level = _row_level(p_draft, length, sinks, window, tl.maximum(draft_quota, 1), BN)
        target_level = _row_level(p_target, length, sinks, window, k, BN)
        total = _pack(
            p_draft, p_target, p_slots, 0, length, length, sinks, window,
            draft_level, target_level, draft_quota, k, True, BN,
        )  # fmt: skip
        at = places
        tl.debug_barrier()  # other threads wrote the slots than read them
    slots = tl.load(p_slots + at, mask=places < total, other=_LARGEST)
    draft = _keys(p_draft, slots, length, sinks, window)
    target = _keys(p_target, slots, length, sinks, window)
    # the last tier takes again what the others took, so that `k` is all there is to count
    chosen = _take(tl.where(_take(draft, draft_quota, BITS), _PROTECTED, target), k, BITS).to(tl.int32)
    tl.store(p_out + i_b * k + tl.cumsum(chosen, 0) - 1, slots, mask=chosen != 0)
    rest = tl.arange(0, BK)
    tl.store(p_out + i_b * k + rest, -1, mask=(rest < k) & (rest >= length))


def triton_topk_select(draft_scores, target_scores, lengths, draft_quota, sinks, window, k):
    """As `naive_topk_select`, for scores that are not negative, as sums of softmaxes are; rows must be contiguous."""
    if k > MOST:
        return naive_topk_select(draft_scores, target_scores, lengths, draft_quota, sinks, window, k)
    check_topk_select(draft_scores, target_scores, lengths, draft_quota, sinks, window, k)
    batch, slots = draft_scores.shape
    padded = triton.next_power_of_2(k)
    groups = min(max(2 * padded, GROUPS), MOST)
    chunk = max(256, triton.next_power_of_2(triton.cdiv(slots, CHUNKS)))
    chunks = triton.cdiv(slots, chunk)
    out, maxima, candidates, counts = (
        torch.empty(batch, n, dtype=torch.int32, device=draft_scores.device)
        for n in (k, 2 * groups, chunks * chunk, CHUNKS)
    )
    scores = draft_scores, target_scores, lengths
    strides = draft_scores.stride(0), target_scores.stride(0)
    with torch.cuda.device_of(draft_scores):  # a launch goes to the current device, whatever its tensors are on
        _maxima_kernel[(groups // GROUPS, batch)](
            *scores, maxima, *strides, sinks, window, NG=groups, BG=GROUPS, BN=DEPTH, num_warps=MAXIMA_WARPS
        )
        _candidates_kernel[(chunks, batch)](
            *scores, draft_quota, maxima, candidates, counts, *strides, chunks * chunk, chunk, sinks, window, k,
            NG=groups, CHUNKS=CHUNKS, BN=min(TILE, chunk), BITS=BITS, num_warps=CANDIDATES_WARPS,
        )  # fmt: skip
        _select_kernel[(batch,)](
            *scores, draft_quota, candidates, counts, out, *strides, chunks * chunk, chunk, chunks, sinks, window, k,
            CHUNKS=CHUNKS, BN=min(TILE, chunk), BC=4 * padded, BK=padded, BITS=BITS,
            num_warps=max(SELECT_WARPS, min(padded // 128, 32)),
        )  # fmt: skip
    return out


topk_select_op = custom_op(naive_topk_select, triton_topk_select)


@topk_select_op.register_fake
def _(draft_scores, target_scores, lengths, draft_quota, sinks, window, k):
    return lengths.new_empty(len(lengths), k, dtype=torch.int32)
