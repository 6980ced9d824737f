"""The Triton kernels behind full and sparse attention: packed queries, slots split where that pays, then merged."""

from functools import cache

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
NEVER = tl.constexpr(-1e30)  # a score that is never seen; infinity would make NaN of differences
# Programs to aim at: as many as the multiprocessors of a large GPU hold at once, two on each where heads are small.
PROGRAMS = 132
# From here on a few hundred chosen slots are not split: the merge would cost more (measured).
ENOUGH = 32
MERGED_ROWS = 8  # of a program of the merge
WARPS, STAGES = 4, 3  # of the others
MOST_SHARED = 227 * 1024  # bytes of shared memory of a program, on a large GPU


@triton.jit
def _queries(p_q, s_qb, s_ql, s_qh, i_b, i_h, L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
             BD: tl.constexpr):  # fmt: skip
    """The group's queries as one tile: row = token * G + head in group."""
    rows, dims = tl.arange(0, BM), tl.arange(0, BD)
    at = i_b * s_qb + (rows // G)[:, None] * s_ql + (i_h * G + rows % G)[:, None] * s_qh + dims[None, :]
    return tl.load(p_q + at, mask=(rows < L * G)[:, None] & (dims < D)[None, :], other=0.0)


@triton.jit
def _rows_of(base, slots, stride, mask, D: tl.constexpr, BD: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values of some slots, `[slots, BD]`."""
    dims = tl.arange(0, BD)
    at = base + slots.to(tl.int64)[:, None] * stride + dims[None, :]
    if MASKED:
        return tl.load(at, mask=mask[:, None] & (dims < D)[None, :], other=0.0)
    if D == BD:
        return tl.load(at)
    return tl.load(at, mask=(dims < D)[None, :], other=0.0)


@triton.jit
def _attend(b_q, b_k, b_v, seen, b_m, b_l, b_o, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of the online softmax; `seen` says which scores count where `MASKED`."""
    b_x = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision=PRECISION) * scale_log2
    if MASKED:
        b_x = tl.where(seen, b_x, NEVER)
    b_new = tl.maximum(b_m, tl.max(b_x, 1))
    b_p = tl.exp2(b_x - b_new[:, None])
    if MASKED:
        b_p = tl.where(seen, b_p, 0.0)
    decay = tl.exp2(b_m - b_new)
    b_l = b_l * decay + tl.sum(b_p, 1)
    b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o * decay[:, None], input_precision=PRECISION)
    return b_new, b_l, b_o


@triton.jit
def _span(p_row, i_s, n_chosen, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr):
    """Places of one split: none where it has no slot.

    All of them are read at once, so that the L1 cache holds them when the loop needs them: its loads of keys and
    values wait for each tile's slots.
    """
    per_split = tl.cdiv(tl.cdiv(n_chosen, BN), SPLITS) * BN
    begin = i_s * per_split
    end = tl.minimum(begin + per_split, n_chosen)
    places = begin + tl.arange(0, BK)
    used = tl.max(tl.load(p_row + places, mask=places < end, other=-1), 0) >= 0
    return begin, tl.where(used, end, begin)


@triton.jit
def _attend_chosen(b_q, p_row, k_base, v_base, s_kt, s_vt, i_s, n_chosen, scale_log2, D: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BD: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, ALL: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """The online softmax over the chosen slots of one split; `ALL`: over `BK` of them, whatever they hold."""
    begin, end = 0, BK
    if not ALL:
        begin, end = _span(p_row, i_s, n_chosen, BN, BK, SPLITS)
    b_m = tl.full([BM], NEVER, tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    for n in tl.range(begin, end, BN):
        places = n + tl.arange(0, BN)
        slots = tl.load(p_row + places, mask=places < end, other=-1)
        there = slots >= 0
        # an unused place reads slot 0 and does not count: loads without a mask are faster
        slots = tl.maximum(slots, 0)
        b_k = _rows_of(k_base, slots, s_kt, there, D, BD, False)
        b_v = _rows_of(v_base, slots, s_vt, there, D, BD, False)
        b_m, b_l, b_o = _attend(b_q, b_k, b_v, there[None, :], b_m, b_l, b_o, scale_log2, True, PRECISION)
    return b_m, b_l, b_o


@triton.jit
def _finish(p_o, p_lse, p_part_o, p_part_lse, i_b, i_h, i_s, n_heads, b_m, b_l, b_o,
            L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
            SPLITS: tl.constexpr, LSE: tl.constexpr):  # fmt: skip
    """Store the result, or where slots are split this part of it, for `merge_kernel`."""
    rows, dims = tl.arange(0, BM), tl.arange(0, BD)
    live = rows < L * G
    wanted = live[:, None] & (dims < D)[None, :]
    empty = b_l == 0.0
    b_o = b_o / tl.where(empty, 1.0, b_l)[:, None]
    lse = tl.where(empty, NEVER, b_m + tl.log2(tl.where(empty, 1.0, b_l)))  # of base 2
    if SPLITS > 1:
        part = ((i_b * n_heads + i_h) * SPLITS + i_s) * BM + rows
        tl.store(p_part_o + part[:, None] * BD + dims[None, :], b_o, mask=wanted)
        tl.store(p_part_lse + part, lse, mask=live)
    else:
        row = (i_b * L + rows // G) * (n_heads * G) + i_h * G + rows % G
        tl.store(p_o + row[:, None] * D + dims[None, :], b_o.to(p_o.dtype.element_ty), mask=wanted)
        if LSE:
            tl.store(p_lse + row, tl.where(empty, float("-inf"), lse / 1.4426950408889634), mask=live)


@triton.jit
def merge_kernel(
    p_part_o, p_part_lse, p_o, p_lse, n_heads,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    SPLITS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """A few rows of the results, from those of all splits."""
    i_bh = tl.program_id(0).to(tl.int64)
    rows, dims, splits = tl.program_id(1) * BR + tl.arange(0, BR), tl.arange(0, BD), tl.arange(0, SPLITS)
    live = rows < L * G
    wanted = live[:, None] & (dims < D)[None, :]
    parts = (i_bh * SPLITS + splits)[:, None] * BM + rows[None, :]
    b_lse = tl.load(p_part_lse + parts, mask=live[None, :], other=NEVER)
    high = tl.max(b_lse, 0)
    total = tl.sum(tl.exp2(b_lse - high[None, :]), 0)
    b_o = tl.zeros([BR, BD], tl.float32)
    for i_s in range(SPLITS):
        part = (i_bh * SPLITS + i_s) * BM + rows
        weight = tl.exp2(tl.load(p_part_lse + part, mask=live, other=NEVER) - high) / total
        b_o += weight[:, None] * tl.load(p_part_o + part[:, None] * BD + dims[None, :], mask=wanted, other=0.0)
    row = (i_bh // n_heads * L + rows // G) * (n_heads * G) + i_bh % n_heads * G + rows % G
    tl.store(p_o + row[:, None] * D + dims[None, :], b_o.to(p_o.dtype.element_ty), mask=wanted)
    if LSE:
        lse = tl.where(high == NEVER, float("-inf"), (high + tl.log2(total)) / 1.4426950408889634)
        tl.store(p_lse + row, lse, mask=live)


@triton.jit
def full_attention_kernel(
    p_q, p_k, p_v, p_start, p_o, p_lse, p_part_o, p_part_lse,
    s_qb, s_ql, s_qh, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, n_heads, scale_log2,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    SPLITS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Everything up to the block's end: whole tiles without a mask, then what is left."""
    i_b, i_h, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    start = tl.load(p_start + i_b)
    b_q = _queries(p_q, s_qb, s_ql, s_qh, i_b, i_h, L, G, D, BM, BD)
    token = tl.arange(0, BM) // G
    k_base = p_k + i_b * s_kb + i_h * s_kh
    v_base = p_v + i_b * s_vb + i_h * s_vh

    total = tl.maximum(start + L, 0)
    per_split = tl.cdiv(tl.cdiv(total, BN), SPLITS) * BN
    begin = i_s * per_split
    end = tl.minimum(begin + per_split, total)
    # every query sees slots 0 .. start
    whole = tl.minimum(end, tl.maximum(start + 1, 0) // BN * BN)
    b_m = tl.full([BM], NEVER, tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    for n in tl.range(begin, whole, BN):
        slots = n + tl.arange(0, BN)
        b_k = _rows_of(k_base, slots, s_kt, True, D, BD, False)
        b_v = _rows_of(v_base, slots, s_vt, True, D, BD, False)
        b_m, b_l, b_o = _attend(b_q, b_k, b_v, True, b_m, b_l, b_o, scale_log2, False, PRECISION)
    for n in tl.range(tl.maximum(begin, whole), end, BN, num_stages=1):
        slots = n + tl.arange(0, BN)
        there = slots < end
        b_k = _rows_of(k_base, slots, s_kt, there, D, BD, True)
        b_v = _rows_of(v_base, slots, s_vt, there, D, BD, True)
        seen = there[None, :] & (slots[None, :] <= (start + token)[:, None])
        b_m, b_l, b_o = _attend(b_q, b_k, b_v, seen, b_m, b_l, b_o, scale_log2, True, PRECISION)
    _finish(p_o, p_lse, p_part_o, p_part_lse, i_b, i_h, i_s, n_heads, b_m, b_l, b_o,
            L, G, D, BM, BD, SPLITS, True)  # fmt: skip


@triton.jit
def sparse_attention_kernel(
    p_q, p_k, p_v, p_indices, p_start, p_o, p_lse, p_part_o, p_part_lse,
    s_qb, s_ql, s_qh, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ib, s_ih, n_heads, n_chosen, scale_log2,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, ALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chosen slots, then the block's own tokens."""
    i_b, i_h, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    p_row = p_indices + i_b * s_ib + i_h * s_ih
    k_base = p_k + i_b * s_kb + i_h * s_kh
    v_base = p_v + i_b * s_vb + i_h * s_vh
    start = tl.load(p_start + i_b)
    b_q = _queries(p_q, s_qb, s_ql, s_qh, i_b, i_h, L, G, D, BM, BD)
    token = tl.arange(0, BM) // G

    # the block's own tokens are for the last split; asked for early, so that nobody waits for them at the end
    own = tl.arange(0, BL)
    mine = (own < tl.where(i_s == SPLITS - 1, L, 0)) & (start + own >= 0)
    own_k = _rows_of(k_base, start + own, s_kt, mine, D, BD, True)
    own_v = _rows_of(v_base, start + own, s_vt, mine, D, BD, True)

    b_m, b_l, b_o = _attend_chosen(
        b_q, p_row, k_base, v_base, s_kt, s_vt, i_s, n_chosen, scale_log2, D, BM, BN, BD, BK, SPLITS, ALL, PRECISION
    )
    seen = mine[None, :] & (own[None, :] <= token[:, None])
    b_m, b_l, b_o = _attend(b_q, own_k, own_v, seen, b_m, b_l, b_o, scale_log2, True, PRECISION)
    _finish(p_o, p_lse, p_part_o, p_part_lse, i_b, i_h, i_s, n_heads, b_m, b_l, b_o,
            L, G, D, BM, BD, SPLITS, True)  # fmt: skip


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; without a GPU, what a large one has."""
    if device.type != "cuda":
        return MOST_SHARED
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", MOST_SHARED)


def tile_of(slot_bytes: int, rows: int, own: int, shared: int) -> int:
    """Slots of a tile: `STAGES` tiles of keys and values fit `shared` bytes beside the queries and the own tokens."""
    left = shared - 1024 - (rows + 2 * own) * slot_bytes
    fitting = max(1, left // (2 * STAGES * slot_bytes))
    return min(128, max(16, 1 << (fitting.bit_length() - 1)))


def sparse_splits(programs: int, tiles: int) -> int:
    """Parts to split a few hundred chosen slots into, for that many rows times heads."""
    return 1 if programs > ENOUGH else min(4, triton.next_power_of_2(max(1, tiles)))


def places_of(chosen: int, tile: int, splits: int, slot_bytes: int) -> dict[str, int | bool]:
    """Places of one split, as a power of two, and whether a program takes just these without looking at them first.

    A loop of known length is faster where slots are wide. Where they are narrow, reading all places ahead pays more
    (measured).
    """
    places = max(16, triton.next_power_of_2(triton.cdiv(triton.cdiv(chosen, tile), splits) * tile))
    return {"BK": places, "ALL": splits == 1 and chosen == places and slot_bytes >= 256}


class Parts:
    """Where the splits of one launch leave their results, and the launch that merges them.

    Args:
        like: decides the device.
        shape: `(B, H, SPLITS, BM, BD)` of the launch.
    """

    def __init__(self, like: torch.Tensor, shape: tuple[int, int, int, int, int]):
        self.batch, self.heads, self.splits, rows, padded = shape
        size = self.batch * self.heads * self.splits * rows if self.splits > 1 else 0
        self.o = torch.empty(size * padded, dtype=torch.float32, device=like.device)
        self.lse = torch.empty(size, dtype=torch.float32, device=like.device)

    def merge(self, o: torch.Tensor, lse: torch.Tensor | None, sizes: dict[str, int]) -> None:
        """Fill `o` and, where it is wanted, `lse`; nothing to do where nothing was split."""
        if self.splits > 1:
            wanted = "L", "G", "D", "BM", "BD", "SPLITS"
            merge_kernel[(self.batch * self.heads, triton.cdiv(sizes["L"] * sizes["G"], MERGED_ROWS))](
                self.o, self.lse, o, o if lse is None else lse, self.heads,
                **{name: sizes[name] for name in wanted}, BR=MERGED_ROWS, LSE=lse is not None, num_warps=2,
            )  # fmt: skip


def split_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a kernel: over `indices [B, 1 or H, K]` and the block's own tokens, or without them over whole rows.

    Arguments and results as of `naive_sparse_attention` and `naive_full_attention`. The number of splits follows from
    the shape of the batch and the storage, never from lengths, so shapes compile once.
    """
    batch, new, q_heads, dim = q.shape
    heads, slots = k.shape[1], k.shape[2]
    group = q_heads // heads
    rows, padded, own = (max(16, triton.next_power_of_2(n)) for n in (new * group, dim, new))
    slot_bytes = padded * k.element_size()
    tile = tile_of(slot_bytes, rows, own, shared_memory(k.device))
    if indices is None:
        programs = PROGRAMS if slot_bytes > 128 else 2 * PROGRAMS
        splits = triton.next_power_of_2(max(1, programs // (batch * heads)))
        splits = min(splits, triton.next_power_of_2(triton.cdiv(slots, tile)), 64)
    else:
        splits = sparse_splits(batch * heads, triton.cdiv(indices.shape[2], tile))
    o = torch.empty(batch, new, q_heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, new, q_heads, dtype=torch.float32, device=q.device)
    parts = Parts(q, (batch, heads, splits, rows, padded))
    outputs = (o, lse, parts.o, parts.lse)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    sizes = {"L": new, "G": group, "D": dim, "BM": rows, "BN": tile, "BD": padded, "SPLITS": splits}
    options = {"PRECISION": "ieee" if q.dtype == torch.float32 else "tf32", "num_warps": WARPS, "num_stages": STAGES}
    grid = (batch, heads, splits)
    with torch.cuda.device_of(q):  # a launch goes to the current device, whatever its tensors are on
        if indices is None:
            full_attention_kernel[grid](q, k, v, start, *outputs, *strides, heads, scale * LOG2E, **sizes, **options)
        else:
            per_head = indices.stride(1) if indices.shape[1] > 1 else 0
            sparse_attention_kernel[grid](
                q, k, v, indices, start, *outputs, *strides, indices.stride(0), per_head, heads, indices.shape[2],
                scale * LOG2E, BL=own, **places_of(indices.shape[2], tile, splits, slot_bytes),
                **sizes, **options,
            )  # fmt: skip
        parts.merge(o, lse, sizes)
    return o, lse
