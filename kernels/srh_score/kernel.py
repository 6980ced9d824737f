"""Triton kernels of srh_score: raw scores and their partial softmax sums in one read of the keys, then column sums."""

import torch
import triton
import triton.language as tl

from .naive import check_srh_score

TILE = 256
LOG2E = 1.4426950408889634


@triton.jit
def _scores_kernel(
    p_q, p_k, p_kv_heads, p_lengths, p_scores, p_max, p_sum,
    s_qb, s_qi, s_qh, s_kb, s_kh, s_kt, n_slots, n_tiles, scale_log2,
    NQ: tl.constexpr, NH: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_h = tl.program_id(1)
    i_b = tl.program_id(2).to(tl.int64)
    length = tl.load(p_lengths + i_b)
    queries, dims = tl.arange(0, BM), tl.arange(0, BD)
    part = ((i_b * NH + i_h) * NQ + queries) * n_tiles + i_n
    if i_n * BN >= length:
        tl.store(p_max + part, -1e30, mask=queries < NQ)
        tl.store(p_sum + part, 0.0, mask=queries < NQ)
        return
    slots = i_n * BN + tl.arange(0, BN)
    held, in_dim = slots < length, dims < D
    q_at = i_b * s_qb + queries[:, None] * s_qi + i_h * s_qh + dims[None, :]
    b_q = tl.load(p_q + q_at, mask=(queries < NQ)[:, None] & in_dim[None, :], other=0.0)
    kv_head = tl.load(p_kv_heads + i_h).to(tl.int64)
    k_at = i_b * s_kb + kv_head * s_kh + slots.to(tl.int64)[:, None] * s_kt + dims[None, :]
    b_k = tl.load(p_k + k_at, mask=held[:, None] & in_dim[None, :], other=0.0)
    b_x = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision=PRECISION) * scale_log2
    b_x = tl.where(held[None, :], b_x, -1e30)
    b_m = tl.max(b_x, 1)
    tl.store(p_max + part, b_m, mask=queries < NQ)
    tl.store(p_sum + part, tl.sum(tl.exp2(b_x - b_m[:, None]), 1), mask=queries < NQ)
    row = (i_b * NH + i_h) * NQ + queries
    tl.store(p_scores + row[:, None] * n_slots + slots[None, :], b_x, mask=(queries < NQ)[:, None] & held[None, :])


@triton.jit
def _columns_kernel(
    p_scores, p_max, p_sum, p_lengths, p_counts, p_out, n_slots, n_tiles,
    NQ: tl.constexpr, NH: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    i_n = tl.program_id(0)
    i_b = tl.program_id(1).to(tl.int64)
    length, count = tl.load(p_lengths + i_b), tl.load(p_counts + i_b)
    slots = i_n * BN + tl.arange(0, BN)
    held = slots < length
    b_out = tl.zeros([BN], tl.float32)
    if i_n * BN < length:
        tiles = tl.arange(0, BT)
        for row in range(NH * NQ):
            if row % NQ < count:
                at = i_b * NH * NQ + row
                t_m = tl.load(p_max + at * n_tiles + tiles, mask=tiles < n_tiles, other=-1e30)
                t_s = tl.load(p_sum + at * n_tiles + tiles, mask=tiles < n_tiles, other=0.0)
                high = tl.max(t_m, 0)
                total = tl.sum(t_s * tl.exp2(t_m - high), 0)
                b_x = tl.load(p_scores + at * n_slots + slots, mask=held, other=-1e30)
                b_out += tl.where(held, tl.exp2(b_x - high) / total, 0.0)
    tl.store(p_out + i_b * n_slots + slots, b_out, mask=slots < n_slots)


def triton_srh_score(
    q: torch.Tensor,
    k: torch.Tensor,
    kv_heads: torch.Tensor,
    lengths: torch.Tensor,
    counts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `naive_srh_score`; the last dimension of `q` and `k` must be contiguous."""
    check_srh_score(q, k, kv_heads, lengths, counts, scale)
    batch, n_queries, n_heads, dim = q.shape
    slots = k.shape[2]
    tiles = triton.cdiv(slots, TILE)
    scores = torch.empty(batch, n_heads, n_queries, slots, dtype=torch.float32, device=q.device)
    high, total = torch.empty(2, batch, n_heads, n_queries, tiles, dtype=torch.float32, device=q.device)
    out = torch.empty(batch, slots, dtype=torch.float32, device=q.device)
    with torch.cuda.device_of(q):
        _scores_kernel[(tiles, n_heads, batch)](
            q, k, kv_heads, lengths, scores, high, total,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2), slots, tiles, scale * LOG2E,
            NQ=n_queries, NH=n_heads, D=dim, BM=max(16, triton.next_power_of_2(n_queries)), BN=TILE,
            BD=max(16, triton.next_power_of_2(dim)), PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=4,
        )  # fmt: skip
        _columns_kernel[(tiles, batch)](
            scores, high, total, lengths, counts, out, slots, tiles,
            NQ=n_queries, NH=n_heads, BN=TILE, BT=triton.next_power_of_2(tiles), num_warps=4,
        )  # fmt: skip
    return out


srh_score_op = torch.library.custom_op("dustin_hf::srh_score", triton_srh_score, mutates_args=())


@srh_score_op.register_fake
def _(q, k, kv_heads, lengths, counts, scale):
    return q.new_empty(q.shape[0], k.shape[2], dtype=torch.float32)
