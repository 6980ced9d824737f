"""Triton kernels of srh_score: raw scores of all chosen heads in one read of the keys, then their column sums."""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op

from .naive import check_srh_score, naive_srh_score

LOG2E = 1.4426950408889634
# A program of the first kernel reads TILES tiles of TILE_BYTES of keys, WARPS warps with STAGES tiles in flight.
TILE_BYTES = 16384
TILES = 8
WARPS = 4
STAGES = 3
# Elements of scores that a program holds at once, in the first and in the second kernel.
HELD = 4096
COLUMNS = 4096
# The scores between the kernels fit the L2 cache; the keys that stream through it must not push them out.
POLICY = "evict_last"


@triton.jit
def _scores_kernel(
    p_q, p_k, p_kv_heads, p_lengths, p_counts, p_scores, p_lse,
    s_qb, s_qi, s_qh, s_kb, s_kh, s_kt, width, n_chunks, scale_log2,
    NQ: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    TILES: tl.constexpr, PER_KV_HEAD: tl.constexpr, PRECISION: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    i_h = tl.program_id(2)  # last: programs that find nothing to do come last
    length, count = tl.load(p_lengths + i_b).to(tl.int32), tl.load(p_counts + i_b).to(tl.int32)
    begin = i_n * TILES * BN
    if (begin >= length) | (count <= 0):
        return
    # rows of the tile are all chosen queries, row = query * NH + head; a program serves those of one key/value head
    rows = tl.arange(0, BM)
    row_kv_heads = tl.load(p_kv_heads + rows % NH, mask=rows < NQ * NH, other=-1)
    # a program for each key/value head, or for each chosen head where those are fewer: then the first of several serves
    kv_head = i_h.to(tl.int64) if PER_KV_HEAD else tl.load(p_kv_heads + i_h).to(tl.int64)
    mine = row_kv_heads == kv_head
    first = tl.min(tl.where(mine, rows, BM), 0)
    idle = first == BM if PER_KV_HEAD else first < i_h
    if idle:
        return
    mine = mine & (rows < NH * count)

    dims, columns = tl.arange(0, BD), tl.arange(0, BN)
    in_dim = dims < D
    q_at = i_b * s_qb + (rows // NH)[:, None] * s_qi + (rows % NH)[:, None] * s_qh + dims[None, :]
    b_q = tl.load(p_q + q_at, mask=mine[:, None] & in_dim[None, :], other=0.0).to(p_k.dtype.element_ty)
    k_base = p_k + i_b * s_kb + kv_head * s_kh
    row = i_b * NQ * NH + rows
    x_base = p_scores + row[:, None] * width
    # maxima and sums stay apart for each column of the tile until the end, so that the loop reduces nothing
    b_m = tl.full([BM, BN], -1e30, tl.float32)
    b_l = tl.zeros([BM, BN], tl.float32)
    for n in range(begin, tl.minimum(begin + TILES * BN, length), BN):
        slots = n + columns
        held = slots < length
        k_at = k_base + slots.to(tl.int64)[:, None] * s_kt + dims[None, :]
        # read once: the caches are for the scores
        b_k = tl.load(k_at, mask=held[:, None] & in_dim[None, :], other=0.0, eviction_policy="evict_first")
        b_x = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2
        tl.store(x_base + slots[None, :], b_x, mask=mine[:, None], eviction_policy=POLICY)
        b_x = tl.where(held[None, :], b_x, -1e30)
        decay = tl.exp2(-tl.abs(b_x - b_m))
        b_l = tl.where(b_x > b_m, b_l * decay + 1.0, b_l + decay)
        b_m = tl.maximum(b_m, b_x)
    high = tl.max(b_m, 1)
    lse = high + tl.log2(tl.sum(b_l * tl.exp2(b_m - high[:, None]), 1))
    tl.store(p_lse + row * n_chunks + i_n, lse, mask=mine)


@triton.jit
def _columns_kernel(
    p_scores, p_lse, p_lengths, p_counts, p_out, s_out, width, n_chunks, chunk,
    NQ: tl.constexpr, NH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    length, count = tl.load(p_lengths + i_b).to(tl.int32), tl.load(p_counts + i_b).to(tl.int32)
    if (i_n * BN >= length) | (count <= 0):
        return
    rows, chunks = tl.arange(0, BM), tl.arange(0, BC)
    slots = i_n * BN + tl.arange(0, BN)
    counted, held = rows < NH * tl.minimum(count, NQ), slots < length
    row = (i_b * NQ * NH + rows)[:, None]
    x_at = p_scores + row * width + slots[None, :]
    b_x = tl.load(x_at, mask=counted[:, None], other=0.0, eviction_policy="evict_first")
    written = counted[:, None] & (chunks * chunk < length)[None, :]
    b_lse = tl.load(p_lse + row * n_chunks + chunks[None, :], mask=written, other=-1e30)
    high = tl.max(b_lse, 1)
    lse = high + tl.log2(tl.sum(tl.exp2(b_lse - high[:, None]), 1))
    weights = tl.exp2(tl.where(counted[:, None] & held[None, :], b_x - lse[:, None], -1e30))
    out_at = p_out + i_b * s_out + slots
    tl.store(out_at, tl.load(out_at, mask=held, other=0.0) + tl.sum(weights, 0), mask=held)


def triton_srh_score(out, q, k, kv_heads, lengths, counts, scale):
    """As `naive_srh_score`; the last dimension of `out`, `q` and `k` must be contiguous."""
    check_srh_score(out, q, k, kv_heads, lengths, counts, scale)
    batch, n_queries, n_heads, dim = q.shape
    heads, slots = k.shape[1], k.shape[2]
    n_rows = n_queries * n_heads
    rows, padded_dim = max(16, triton.next_power_of_2(n_rows)), max(16, triton.next_power_of_2(dim))
    tile = max(16, min(TILE_BYTES // (padded_dim * k.element_size()), HELD // rows))
    chunk = TILES * tile
    chunks = triton.cdiv(slots, chunk)
    columns = max(32, COLUMNS // triton.next_power_of_2(n_rows))
    width = triton.cdiv(slots, max(chunk, columns)) * max(chunk, columns)  # whole tiles, stored without a mask
    scores = torch.empty(batch, n_rows, width, dtype=torch.float32, device=q.device)
    lse = torch.empty(batch, n_rows, chunks, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):  # a launch goes to the current device, whatever its tensors are on
        _scores_kernel[(chunks, batch, min(n_heads, heads))](
            q, k, kv_heads, lengths, counts, scores, lse,
            *q.stride()[:3], *k.stride()[:3], width, chunks, scale * LOG2E,
            NQ=n_queries, NH=n_heads, D=dim, BM=rows, BN=tile, BD=padded_dim, TILES=TILES,
            PER_KV_HEAD=heads <= n_heads, PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            POLICY=POLICY, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        _columns_kernel[(triton.cdiv(slots, columns), batch)](
            scores, lse, lengths, counts, out, out.stride(0), width, chunks, chunk,
            NQ=n_queries, NH=n_heads, BM=triton.next_power_of_2(n_rows), BN=columns,
            BC=triton.next_power_of_2(chunks), num_warps=4,
        )  # fmt: skip


srh_score_op = custom_op(naive_srh_score, triton_srh_score, changes=("out",))


@srh_score_op.register_fake
def _(out, q, k, kv_heads, lengths, counts, scale):
    return None
