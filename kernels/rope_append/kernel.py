"""Triton kernel of rope_append: a program per token and a few heads."""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op

from .naive import check_rope_append, naive_rope_append

HEADS = 4  # of a program


@triton.jit
def _normed(b_1, b_2, p_norm, half, in_half, eps, D: tl.constexpr, dtype: tl.constexpr):
    """Both halves of some heads, normalised by head."""
    scale = tl.rsqrt((tl.sum(b_1 * b_1, 1) + tl.sum(b_2 * b_2, 1)) / D + eps)[:, None]
    w_1 = tl.load(p_norm + half, mask=in_half, other=0.0)
    w_2 = tl.load(p_norm + D // 2 + half, mask=in_half, other=0.0)
    n_1 = w_1[None, :] * (b_1 * scale).to(dtype)
    n_2 = w_2[None, :] * (b_2 * scale).to(dtype)
    return n_1.to(tl.float32), n_2.to(tl.float32)


@triton.jit
def _rope_append_kernel(
    p_qkv, p_bias, p_q_norm, p_k_norm, p_cos, p_sin, p_start, p_keys, p_values,
    s_qb, s_ql, s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, n_slots, n_positions, eps,
    L: tl.constexpr, HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
    BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    i_b, i_t = (tl.program_id(0) // L).to(tl.int64), tl.program_id(0) % L
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    half = tl.arange(0, BD)
    in_half = half < D // 2
    mask = (heads < HQ + 2 * H)[:, None] & in_half[None, :]
    slot = tl.load(p_start + i_b).to(tl.int64) + i_t
    at = heads[:, None] * D + half[None, :]
    p_1 = p_qkv + i_b * s_qb + i_t * s_ql + at
    dtype = p_qkv.dtype.element_ty
    b_1 = tl.load(p_1, mask=mask, other=0.0)
    b_2 = tl.load(p_1 + D // 2, mask=mask, other=0.0)
    if BIAS:
        b_1 = b_1 + tl.load(p_bias + at, mask=mask, other=0.0)
        b_2 = b_2 + tl.load(p_bias + at + D // 2, mask=mask, other=0.0)
    b_1, b_2 = b_1.to(dtype).to(tl.float32), b_2.to(dtype).to(tl.float32)
    is_q, is_k = (heads < HQ)[:, None], ((heads >= HQ) & (heads < HQ + H))[:, None]
    r_1, r_2 = b_1, b_2
    if NORM:
        q_1, q_2 = _normed(b_1, b_2, p_q_norm, half, in_half, eps, D, dtype)
        k_1, k_2 = _normed(b_1, b_2, p_k_norm, half, in_half, eps, D, dtype)
        r_1, r_2 = tl.where(is_q, q_1, k_1), tl.where(is_q, q_2, k_2)
    row = tl.minimum(tl.maximum(slot, 0), n_positions - 1) * D
    cos_1 = tl.load(p_cos + row + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_2 = tl.load(p_cos + row + D // 2 + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_1 = tl.load(p_sin + row + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_2 = tl.load(p_sin + row + D // 2 + half, mask=in_half, other=0.0).to(tl.float32)[None, :]
    o_1 = (r_1 * cos_1 - r_2 * sin_1).to(dtype)
    o_2 = (r_2 * cos_2 + r_1 * sin_2).to(dtype)
    tl.store(p_1, o_1, mask=mask & is_q)
    tl.store(p_1 + D // 2, o_2, mask=mask & is_q)
    slots = slot + heads * 0  # a block: the interpreter makes masks of scalars integers
    there = mask & ((slots >= 0) & (slots < n_slots))[:, None]
    k_at = p_keys + i_b * s_kb + (heads - HQ)[:, None] * s_kh + slot * s_kt + half[None, :]
    tl.store(k_at, o_1, mask=there & is_k)
    tl.store(k_at + D // 2, o_2, mask=there & is_k)
    is_v = (heads >= HQ + H)[:, None]
    v_at = p_values + i_b * s_vb + (heads - HQ - H)[:, None] * s_vh + slot * s_vt + half[None, :]
    tl.store(v_at, b_1.to(dtype), mask=there & is_v)
    tl.store(v_at + D // 2, b_2.to(dtype), mask=there & is_v)


def triton_rope_append(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values):
    """As `naive_rope_append`; the last two dimensions of `qkv` and the last of the others must be contiguous."""
    check_rope_append(qkv, bias, cos, sin, start, keys, values)
    batch, new, heads, dim = qkv.shape
    kv_heads = keys.shape[1]
    with torch.cuda.device_of(qkv):
        _rope_append_kernel[(batch * new, triton.cdiv(heads, HEADS))](
            qkv, qkv if bias is None else bias, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm,
            cos, sin, start, keys, values, qkv.stride(0), qkv.stride(1), *keys.stride()[:3], *values.stride()[:3],
            keys.shape[2], len(cos), eps,
            L=new, HQ=heads - 2 * kv_heads, H=kv_heads, D=dim, BH=HEADS, BD=triton.next_power_of_2(dim // 2),
            BIAS=bias is not None, NORM=q_norm is not None, num_warps=2,
        )  # fmt: skip


rope_append_op = custom_op(naive_rope_append, triton_rope_append, changes=("qkv", "keys", "values"))


@rope_append_op.register_fake
def _(qkv, bias, q_norm, k_norm, eps, cos, sin, start, keys, values):
    return None
