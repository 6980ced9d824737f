"""Triton kernel of silu_mul: a program per piece of a row."""

import torch
import triton
import triton.language as tl

from dustin_hf.kernels.dispatch import custom_op

from .naive import check_silu_mul, naive_silu_mul

TILE = 1024


@triton.jit
def _silu_mul_kernel(p_gate, p_up, p_out, s_gate, s_up, width, BC: tl.constexpr):
    i_n = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BC + tl.arange(0, BC)
    mask = at < width
    b_gate = tl.load(p_gate + i_n * s_gate + at, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_up + i_n * s_up + at, mask=mask, other=0.0).to(tl.float32)
    b_out = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(p_out + i_n * width + at, b_out.to(p_out.dtype.element_ty), mask=mask)


def triton_silu_mul(gate, up):
    """As `naive_silu_mul`; the last dimensions must be contiguous."""
    check_silu_mul(gate, up)
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=gate.dtype, device=gate.device)
    with torch.cuda.device_of(gate):
        _silu_mul_kernel[(rows, triton.cdiv(width, TILE))](
            gate, up, out, gate.stride(0), up.stride(0), width, BC=TILE, num_warps=4
        )
    return out


silu_mul_op = custom_op(naive_silu_mul, triton_silu_mul)


@silu_mul_op.register_fake
def _(gate, up):
    return gate.new_empty(gate.shape)
