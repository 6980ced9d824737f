"""The Triton kernel behind full and sparse attention: packed queries, split over slots, merged in one launch."""

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
# Programs to aim at, two for each multiprocessor of a large GPU (measured best on 132 of them); a few hundred chosen
# slots are not split at all where rows and heads alone nearly fill it: the merge would cost more.
ENOUGH = 100
PROGRAMS = 264


@triton.jit
def _split_attention_kernel(
    p_q, p_k, p_v, p_indices, p_start, p_o, p_lse, p_part_o, p_part_m, p_part_l, p_arrived,
    s_qb, s_ql, s_qh, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ib, s_ih, n_heads, n_chosen, scale_log2,
    L: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    SPLITS: tl.constexpr, SPARSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    i_s = tl.program_id(2)
    start = tl.load(p_start + i_b)

    # rows of the tile are the group's queries: row = token * G + head in group
    rows = tl.arange(0, BM)
    token, head = rows // G, i_h * G + rows % G
    live = rows < L * G
    dims = tl.arange(0, BD)
    in_dim = dims < D
    q_at = i_b * s_qb + token[:, None] * s_ql + head[:, None] * s_qh + dims[None, :]
    b_q = tl.load(p_q + q_at, mask=live[:, None] & in_dim[None, :], other=0.0)

    # slots to visit: the chosen ones and then the block's own, or everything up to the block's end
    if SPARSE:
        total = n_chosen + L
    else:
        total = tl.maximum(start + L, 0)
    tiles = tl.cdiv(total, BN)
    per_split = tl.cdiv(tiles, SPLITS) * BN
    begin = i_s * per_split
    end = tl.minimum(begin + per_split, total)

    b_m = tl.full([BM], -1e30, tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    b_o = tl.zeros([BM, BD], tl.float32)
    k_base = p_k + i_b * s_kb + i_h * s_kh
    v_base = p_v + i_b * s_vb + i_h * s_vh
    for n in range(begin, end, BN):
        places = n + tl.arange(0, BN)
        inside = places < end
        if SPARSE:
            chosen = inside & (places < n_chosen)
            slots = tl.load(p_indices + i_b * s_ib + (i_h * s_ih) + places, mask=chosen, other=-1)
            slots = tl.where(inside & (places >= n_chosen), start + places - n_chosen, slots).to(tl.int64)
        else:
            slots = tl.where(inside, places, -1).to(tl.int64)
        there = slots >= 0
        b_k = tl.load(k_base + slots[:, None] * s_kt + dims[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
        b_v = tl.load(v_base + slots[:, None] * s_vt + dims[None, :], mask=there[:, None] & in_dim[None, :], other=0.0)
        seen = there[None, :] & (slots[None, :] <= (start + token)[:, None])
        b_x = tl.dot(b_q.to(b_k.dtype), tl.trans(b_k), input_precision=PRECISION) * scale_log2
        b_x = tl.where(seen, b_x, -1e30)
        b_new = tl.maximum(b_m, tl.max(b_x, 1))
        b_p = tl.where(seen, tl.exp2(b_x - b_new[:, None]), 0.0)
        decay = tl.exp2(b_m - b_new)
        b_l = b_l * decay + tl.sum(b_p, 1)
        b_o = b_o * decay[:, None] + tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        b_m = b_new

    i_bh = i_b * n_heads + i_h
    last = True
    if SPLITS > 1:
        part = (i_bh * SPLITS + i_s) * BM + rows
        tl.store(p_part_o + part[:, None] * BD + dims[None, :], b_o)
        tl.store(p_part_m + part, b_m)
        tl.store(p_part_l + part, b_l)
        # whoever arrives last has everybody's part in sight, merges, and leaves the counter as it was found
        tl.debug_barrier()
        last = tl.atomic_add(p_arrived + i_bh, 1, sem="acq_rel") == SPLITS - 1
        if last:
            tl.store(p_arrived + i_bh, 0)
            b_m = tl.full([BM], -1e30, tl.float32)
            b_l = tl.zeros([BM], tl.float32)
            b_o = tl.zeros([BM, BD], tl.float32)
            for s in range(SPLITS):
                part = (i_bh * SPLITS + s) * BM + rows
                o_s = tl.load(p_part_o + part[:, None] * BD + dims[None, :], cache_modifier=".cg")
                m_s = tl.load(p_part_m + part, cache_modifier=".cg")
                l_s = tl.load(p_part_l + part, cache_modifier=".cg")
                b_new = tl.maximum(b_m, m_s)
                decay, weight = tl.exp2(b_m - b_new), tl.exp2(m_s - b_new)
                b_o = b_o * decay[:, None] + o_s * weight[:, None]
                b_l = b_l * decay + l_s * weight
                b_m = b_new
    if last:
        empty = b_l == 0.0
        b_o = b_o / tl.where(empty, 1.0, b_l)[:, None]
        lse = tl.where(empty, float("-inf"), (b_m + tl.log2(tl.where(empty, 1.0, b_l))) / 1.4426950408889634)
        row = (i_b * L + token) * (n_heads * G) + head
        o_at = p_o + row[:, None] * D + dims[None, :]
        tl.store(o_at, b_o.to(p_o.dtype.element_ty), mask=live[:, None] & in_dim[None, :])
        tl.store(p_lse + row, lse, mask=live)


def split_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor | None,
    start: torch.Tensor,
    scale: float,
    *,
    tile: int,
    warps: int,
    stages: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel: over `indices [B, 1 or H, K]` and the block's own tokens, or without them over whole rows.

    Arguments and results as of `naive_sparse_attention` and `naive_full_attention`. The number of splits follows from
    the shape of the batch and the storage, never from lengths, so shapes compile once.
    """
    batch, new, q_heads, dim = q.shape
    heads, slots = k.shape[1], k.shape[2]
    group = q_heads // heads
    chosen = 0 if indices is None else indices.shape[2]
    rows = max(16, triton.next_power_of_2(new * group))
    most = triton.cdiv(chosen + new if indices is not None else slots, tile)
    wanted = 1 if indices is not None and batch * heads >= ENOUGH else triton.cdiv(PROGRAMS, batch * heads)
    splits = min(triton.next_power_of_2(wanted), triton.next_power_of_2(most), 64)
    padded = max(16, triton.next_power_of_2(dim))
    o = torch.empty(batch, new, q_heads, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, new, q_heads, dtype=torch.float32, device=q.device)
    parts = batch * heads * splits * rows if splits > 1 else 0
    part_o = torch.empty(parts * padded, dtype=torch.float32, device=q.device)
    part_m, part_l = torch.empty(2, parts, dtype=torch.float32, device=q.device)
    arrived = torch.zeros(batch * heads if splits > 1 else 0, dtype=torch.int32, device=q.device)
    with torch.cuda.device_of(q):  # a launch goes to the current device, whatever its tensors are on
        _split_attention_kernel[(batch, heads, splits)](
            q, k, v, start if indices is None else indices, start, o, lse, part_o, part_m, part_l, arrived,
            q.stride(0), q.stride(1), q.stride(2), k.stride(0), k.stride(1), k.stride(2),
            v.stride(0), v.stride(1), v.stride(2),
            0 if indices is None else indices.stride(0),
            0 if indices is None or indices.shape[1] == 1 else indices.stride(1),
            heads, chosen, scale * LOG2E,
            L=new, G=group, D=dim, BM=rows, BN=tile, BD=padded, SPLITS=splits, SPARSE=indices is not None,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return o, lse
