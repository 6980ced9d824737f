"""Every Triton kernel compiles for Hopper, at real shapes: without a GPU, in a process of its own."""

import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = r'''
import sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
compiled, limit = [], 227 * 1024


def compile_only(self, *args, grid, warmup=False, **kwargs):
    """What a launch would compile, for a device that is not there."""
    import inspect

    options = {k: kwargs.pop(k) for k in ("num_warps", "num_stages") if k in kwargs}
    bound = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    constexprs = {p.name: bound[p.name] for p in self.params if p.is_constexpr}
    signature, attrs = {}, {}
    for i, p in enumerate(self.params):
        value = bound[p.name]
        if p.is_constexpr:
            signature[p.name] = "constexpr"
        elif isinstance(value, torch.Tensor):
            names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
            signature[p.name] = "*" + names[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[p.name] = "fp32"
        elif value == 1:
            signature[p.name] = "constexpr"
            constexprs[p.name] = 1
        else:
            signature[p.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0:
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(self, signature, {(self.arg_names.index(k),): v for k, v in constexprs.items()}, attrs)
    kernel = triton.compile(source, target=TARGET, options=options)
    shared = kernel.metadata.shared
    assert shared <= limit, (self.fn.__name__, shared)
    compiled.append(self.fn.__name__)


JITFunction.run = compile_only
B, T, HQ, H, D, L, K = 16, 4096, 64, 8, 128, 5, 512
bf = torch.bfloat16


def e(*shape, dtype=bf):
    return torch.empty(shape, dtype=dtype)


from dustin_hf.kernels import split_attention
from dustin_hf.kernels.full_attention.kernel import triton_full_attention
from dustin_hf.kernels.kv_append.kernel import triton_kv_append
from dustin_hf.kernels.rms_norm.kernel import triton_rms_norm
from dustin_hf.kernels.rope_append.kernel import triton_rope_append
from dustin_hf.kernels.rope_sparse_attention import kernel as fused_attention
from dustin_hf.kernels.rope_sparse_attention.kernel import triton_rope_sparse_attention
from dustin_hf.kernels.silu_mul.kernel import triton_silu_mul
from dustin_hf.kernels.sparse_attention.kernel import triton_sparse_attention
from dustin_hf.kernels.srh_score.kernel import triton_srh_score
from dustin_hf.kernels.topk_select.kernel import triton_topk_select

start = torch.zeros(B, dtype=torch.int64)
for HQ, H, D, L, dtype in ((64, 8, 128, 5, bf), (14, 2, 64, 1, bf), (28, 4, 128, 4, torch.float32)):
    q, keys = e(B, L, HQ, D, dtype=dtype), e(B, H, T, D, dtype=dtype)
    indices = e(B, 1, K, dtype=torch.int32)
    triton_full_attention(q, keys, keys, start, 0.1)
    triton_sparse_attention(q, keys, keys, indices, start, 0.1)
    qkv, table = e(B, L, HQ + 2 * H, D, dtype=dtype), e(T, D, dtype=dtype)
    rope = (qkv, e((HQ + 2 * H) * D, dtype=dtype), None, None, 1e-6, table, table, start, keys, keys)
    triton_rope_append(*rope)
    norm = e(D, dtype=dtype)
    triton_rope_sparse_attention(*rope, indices, 0.1)
    triton_rope_sparse_attention(qkv, None, norm, norm, *rope[4:], indices, 0.1)
    triton_kv_append(keys, keys, e(B, H, L, D, dtype=dtype), e(B, H, L, D, dtype=dtype), start)
    heads = torch.zeros(4, dtype=torch.int64)
    triton_srh_score(e(B, T, dtype=torch.float32), e(B, L, 4, D, dtype=dtype), keys, heads, start, start, 0.1)
    triton_rms_norm(e(B * L, HQ * D, dtype=dtype), e(HQ * D, dtype=dtype), 1e-6)
    triton_silu_mul(e(B * L, 4864, dtype=dtype), e(B * L, 4864, dtype=dtype))
scores = e(B, T, dtype=torch.float32)
triton_topk_select(scores, scores, start, start, 4, 16, K)
counted = len(compiled)
triton_topk_select(scores, scores, start, start, 4, 16, 8192)
assert len(compiled) == counted + 3
# a tile of more than Triton allows is not asked for
triton_topk_select(scores, scores, start, start, 4, 16, 8193)
assert len(compiled) == counted + 3
# gamma 8 and groups of 8, where shared memory is tightest; and a GPU that has less of it
TIGHT = (16, 2, 64, 9, torch.float32, 227), (16, 2, 128, 9, bf, 227), (64, 8, 128, 5, bf, 99)
for HQ, H, D, L, dtype, kilobytes in TIGHT:
    limit = kilobytes * 1024
    split_attention.shared_memory = fused_attention.shared_memory = lambda device: limit
    keys, indices = e(B, H, T, D, dtype=dtype), e(B, 1, K, dtype=torch.int32)
    q, qkv, table = e(B, L, HQ, D, dtype=dtype), e(B, L, HQ + 2 * H, D, dtype=dtype), e(T, D, dtype=dtype)
    triton_full_attention(q, keys, keys, start, 0.1)
    triton_sparse_attention(q, keys, keys, indices, start, 0.1)
    triton_rope_sparse_attention(qkv, None, None, None, 1e-6, table, table, start, keys, keys, indices, 0.1)
print(len(compiled), sorted(set(compiled)))
'''


def test_kernels_compile_for_hopper():
    import os

    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout.split()[0]) >= 42
