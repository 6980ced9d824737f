"""Triton kernel of rope_sparse_attention: a program rotates its own queries and new keys, stores, and attends."""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op
from dustin_hf.kernels.naive_attention import check_indices
from dustin_hf.kernels.rope_append.naive import check_rope_append
from dustin_hf.kernels.split_attention import (
    LOG2E,
    STAGES,
    WARPS,
    Parts,
    _attend,
    _attend_chosen,
    _finish,
    places_of,
    shared_memory,
    sparse_splits,
    tile_of,
)

from .naive import naive_rope_sparse_attention


@triton.jit
def _biased(p_x, p_bias, at, bias_at, mask, BIAS: tl.constexpr):
    b_x = tl.load(p_x + at, mask=mask, other=0.0)
    if BIAS:
        b_x += tl.load(p_bias + bias_at, mask=mask, other=0.0)
    return b_x


@triton.jit
def _rotated(
    p_x, p_bias, p_norm, p_cos, p_sin, row_at, bias_at, positions, live, eps,
    D: tl.constexpr, BD: tl.constexpr, BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Some heads of some tokens, `[rows, BD]`: bias, norm and rotation applied."""
    dtype = p_x.dtype.element_ty
    dims = tl.arange(0, BD)
    partner = (dims + D // 2) % D
    mask = live[:, None] & (dims < D)[None, :]
    # each element and the one that rotation pairs it with
    b_x = _biased(p_x, p_bias, row_at[:, None] + dims[None, :], bias_at[:, None] + dims[None, :], mask, BIAS)
    b_y = _biased(p_x, p_bias, row_at[:, None] + partner[None, :], bias_at[:, None] + partner[None, :], mask, BIAS)
    if NORM:
        wide = b_x.to(tl.float32)
        norm = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
        b_x = tl.load(p_norm + dims, mask=dims < D, other=0.0)[None, :] * (wide * norm).to(dtype)
        b_y = tl.load(p_norm + partner, mask=dims < D, other=0.0)[None, :] * (b_y.to(tl.float32) * norm).to(dtype)
    angle_at = positions[:, None] * D + dims[None, :]
    b_cos = tl.load(p_cos + angle_at, mask=mask, other=0.0).to(tl.float32)
    b_sin = tl.load(p_sin + angle_at, mask=mask, other=0.0).to(tl.float32)
    b_sin = tl.where((dims < D // 2)[None, :], -b_sin, b_sin)
    return (b_x.to(tl.float32) * b_cos + b_y.to(tl.float32) * b_sin).to(dtype)


@triton.jit
def _rope_sparse_attention_kernel(
    p_qkv, p_bias, p_q_norm, p_k_norm, p_cos, p_sin, p_start, p_keys, p_values, p_indices,
    p_o, p_part_o, p_part_lse,
    s_qb, s_ql, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_ib, s_ih, n_heads, n_slots, n_positions, n_chosen, eps,
    scale_log2, L: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BL: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, ALL: tl.constexpr, BIAS: tl.constexpr,
    NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i_b, i_h, i_s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    p_row = p_indices + i_b * s_ib + i_h * s_ih
    k_base = p_keys + i_b * s_kb + i_h * s_kh
    v_base = p_values + i_b * s_vb + i_h * s_vh
    start = tl.load(p_start + i_b)
    last_position = n_positions - 1

    # rows of the tile are the group's queries: row = token * G + head in group
    rows = tl.arange(0, BM)
    token, head = rows // G, i_h * G + rows % G
    positions = tl.minimum(tl.maximum(start + token, 0), last_position)
    b_q = _rotated(p_qkv, p_bias, p_q_norm, p_cos, p_sin, i_b * s_qb + token * s_ql + head * D, head * D, positions,
                   rows < L * G, eps, D, BD, BIAS, NORM)  # fmt: skip

    # the block's own tokens are for the last split: into the cache, and seen by those that follow
    own, dims = tl.arange(0, BL), tl.arange(0, BD)
    own_slots = (start + own).to(tl.int64)
    given = own < tl.where(i_s == SPLITS - 1, L, 0)
    own_at, k_head, v_head = i_b * s_qb + own * s_ql, n_heads * G + i_h, n_heads * (G + 1) + i_h
    own_positions = tl.minimum(tl.maximum(start + own, 0), last_position)
    own_k = _rotated(p_qkv, p_bias, p_k_norm, p_cos, p_sin, own_at + k_head * D, own * 0 + k_head * D, own_positions,
                     given, eps, D, BD, BIAS, NORM).to(p_keys.dtype.element_ty)  # fmt: skip
    v_at = (own * 0 + v_head * D)[:, None] + dims[None, :]
    v_mask = given[:, None] & (dims < D)[None, :]
    own_v = _biased(p_qkv, p_bias, own_at[:, None] + v_at, v_at, v_mask, BIAS).to(p_values.dtype.element_ty)

    b_m, b_l, b_o = _attend_chosen(
        b_q, p_row, k_base, v_base, s_kt, s_vt, i_s, n_chosen, scale_log2, D, BM, BN, BD, BK, SPLITS, ALL, PRECISION
    )
    stored = v_mask & ((own_slots >= 0) & (own_slots < n_slots))[:, None]
    tl.store(k_base + own_slots[:, None] * s_kt + dims[None, :], own_k, mask=stored)
    tl.store(v_base + own_slots[:, None] * s_vt + dims[None, :], own_v, mask=stored)
    seen = (given & (own_slots >= 0))[None, :] & (own[None, :] <= token[:, None])
    b_m, b_l, b_o = _attend(b_q, own_k, own_v, seen, b_m, b_l, b_o, scale_log2, True, PRECISION)
    _finish(p_o, p_o, p_part_o, p_part_lse, i_b, i_h, i_s, n_heads, b_m, b_l, b_o,
            L, G, D, BM, BD, SPLITS, False)  # fmt: skip


def triton_rope_sparse_attention(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values, indices, scale):
    """As `naive_rope_sparse_attention`; the last two dimensions of `qkv` and the last of the others are contiguous."""
    check_rope_append(qkv, bias, cos, sin, start, keys, values)
    check_indices(indices, qkv, keys)
    batch, new, all_heads, dim = qkv.shape
    heads, chosen = keys.shape[1], indices.shape[2]
    group = all_heads // heads - 2
    rows, padded, own = (max(16, triton.next_power_of_2(n)) for n in (new * group, dim, new))
    slot_bytes = padded * keys.element_size()
    tile = tile_of(slot_bytes, rows, own, shared_memory(keys.device))
    splits = sparse_splits(batch * heads, triton.cdiv(chosen, tile))
    o = torch.empty(batch, new, all_heads - 2 * heads, dim, dtype=qkv.dtype, device=qkv.device)
    parts = Parts(qkv, (batch, heads, splits, rows, padded))
    sizes = {"L": new, "G": group, "D": dim, "BM": rows, "BN": tile, "BD": padded, "SPLITS": splits}
    with torch.cuda.device_of(qkv):
        _rope_sparse_attention_kernel[(batch, heads, splits)](
            qkv, qkv if bias is None else bias, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            cos, sin, start, keys, values, indices, o, parts.o, parts.lse,
            qkv.stride(0), qkv.stride(1), *keys.stride()[:3], *values.stride()[:3],
            indices.stride(0), indices.stride(1) if indices.shape[1] > 1 else 0,
            heads, keys.shape[2], len(cos), chosen, eps, scale * LOG2E,
            **sizes, BL=own, **places_of(chosen, tile, splits, slot_bytes),
            BIAS=bias is not None, NORM=q_norm is not None,
            PRECISION="ieee" if qkv.dtype == torch.float32 else "tf32", num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        parts.merge(o, None, sizes)
    return o


rope_sparse_attention_op = custom_op(
    naive_rope_sparse_attention, triton_rope_sparse_attention, changes=("keys", "values")
)


@rope_sparse_attention_op.register_fake
def _(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values, indices, scale):
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] - 2 * keys.shape[1], qkv.shape[3])
