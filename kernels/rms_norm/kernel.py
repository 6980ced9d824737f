"""Triton kernel of rms_norm: a program per row."""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op

from .naive import check_rms_norm, naive_rms_norm


@triton.jit
def _rms_norm_kernel(p_x, p_weight, p_out, s_x, eps, C: tl.constexpr, BC: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BC)
    mask = at < C
    b_x = tl.load(p_x + i_n * s_x + at, mask=mask, other=0.0).to(tl.float32)
    b_w = tl.load(p_weight + at, mask=mask, other=0.0)
    b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, 0) / C + eps)
    # rounded before the weight, as the models do it
    b_out = b_w * b_x.to(p_out.dtype.element_ty)
    tl.store(p_out + i_n * C + at, b_out.to(p_out.dtype.element_ty), mask=mask)


def triton_rms_norm(x, weight, eps):
    """As `naive_rms_norm`; the last dimension of `x` must be contiguous."""
    check_rms_norm(x, weight)
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    padded = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _rms_norm_kernel[(rows,)](
            x, weight, out, x.stride(0), eps, C=width, BC=padded, num_warps=min(16, max(1, padded // 512))
        )
    return out


rms_norm_op = custom_op(naive_rms_norm, triton_rms_norm)


@rms_norm_op.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape)
