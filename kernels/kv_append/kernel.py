"""Triton kernel of kv_append."""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op

from .naive import check_kv_append, naive_kv_append


@triton.jit
def _kv_append_kernel(
    p_keys, p_values, p_k, p_v, p_start,
    s_kb, s_kh, s_kt, s_vb, s_vh, s_vt, s_nkb, s_nkh, s_nkt, s_nvb, s_nvh, s_nvt, n_slots,
    L: tl.constexpr, D: tl.constexpr, BL: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    i_h = tl.program_id(1).to(tl.int64)
    tokens, dims = tl.arange(0, BL), tl.arange(0, BD)
    slots = tl.load(p_start + i_b).to(tl.int64) + tokens
    there = (tokens < L) & (slots >= 0) & (slots < n_slots)
    mask = there[:, None] & (dims < D)[None, :]
    b_k = tl.load(p_k + i_b * s_nkb + i_h * s_nkh + tokens[:, None] * s_nkt + dims[None, :], mask=mask, other=0.0)
    b_v = tl.load(p_v + i_b * s_nvb + i_h * s_nvh + tokens[:, None] * s_nvt + dims[None, :], mask=mask, other=0.0)
    k_at = p_keys + i_b * s_kb + i_h * s_kh + slots[:, None] * s_kt + dims[None, :]
    v_at = p_values + i_b * s_vb + i_h * s_vh + slots[:, None] * s_vt + dims[None, :]
    tl.store(k_at, b_k.to(p_keys.dtype.element_ty), mask=mask)
    tl.store(v_at, b_v.to(p_values.dtype.element_ty), mask=mask)


def triton_kv_append(keys, values, k, v, start):
    """As `naive_kv_append`; the last dimension of each tensor must be contiguous."""
    check_kv_append(keys, values, k, v, start)
    batch, heads, new, dim = k.shape
    with torch.cuda.device_of(keys):
        _kv_append_kernel[(batch, heads)](
            keys, values, k, v, start,
            *keys.stride()[:3], *values.stride()[:3], *k.stride()[:3], *v.stride()[:3], keys.shape[2],
            L=new, D=dim, BL=triton.next_power_of_2(new), BD=triton.next_power_of_2(dim), num_warps=1,
        )  # fmt: skip


kv_append_op = custom_op(naive_kv_append, triton_kv_append, changes=("keys", "values"))


@kv_append_op.register_fake
def _(keys, values, k, v, start):
    return None
