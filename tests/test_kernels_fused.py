"""The ops of the fused forward: both twins against loops, as in test_kernels."""

import importlib

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, OPS, literal_attention, ops, poisoned_memory, storage  # noqa: F401

from dustin_hf.testing import assert_close


@pytest.mark.parametrize("width", [5, 64, 900])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_and_silu_mul(ops, width, dtype):
    x, weight, y = (torch.randn(n, width, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (7, 1, 8))
    expected = torch.nn.functional.rms_norm(x.float(), (width,), weight[0].float(), 1e-6)
    assert_close("norm", expected, ops.rms_norm(x, weight[0], 1e-6))
    both = torch.cat([x, y[:7]], dim=1)  # halves of one tensor, as merged projections leave them
    gate, up = both.chunk(2, dim=1)
    assert_close("gated", torch.nn.functional.silu(gate.float()) * up.float(), ops.silu_mul(gate, up))


ROPE_SHAPES = [  # new, q_heads, kv_heads, dim, starts, bias, norm
    pytest.param(1, 4, 4, 16, (0, 5, 63), True, False, id="L1-G1-D16-bias"),
    pytest.param(4, 14, 2, 64, (-1, 20, 64), True, False, id="L4-G7-D64-bias-edges"),
    pytest.param(2, 6, 3, 80, (17,), False, True, id="L2-G2-D80-norm"),
    pytest.param(5, 10, 2, 8, (3, 11), False, False, id="L5-G5-D8"),
]


def rope_inputs(new, q_heads, kv_heads, dim, starts, bias, norm, dtype):
    """Arguments of rope_append, and what a loop over tokens makes of them: queries, keys, values."""
    generator = torch.Generator().manual_seed(3)
    batch, heads = len(starts), q_heads + 2 * kv_heads
    qkv = torch.randn(batch, new, heads, dim, generator=generator).to(dtype)
    weights = [torch.randn(n, generator=generator).to(dtype) for n in (heads * dim, dim, dim)]
    bias, q_norm, k_norm = (w if wanted else None for w, wanted in zip(weights, (bias, norm, norm)))
    angles = torch.arange(70)[:, None] * 0.3 ** torch.arange(dim // 2)
    cos, sin = (f(torch.cat([angles, angles], -1)).to(dtype) for f in (torch.cos, torch.sin))
    keys, values = storage(batch, kv_heads, 68, dim, dtype)
    expected = [x.float().clone() for x in (qkv[:, :, :q_heads], keys, values)]
    for b, start in enumerate(starts):
        for i in range(new):
            for h in range(heads):
                x = qkv[b, i, h].float() + (0 if bias is None else bias[h * dim : (h + 1) * dim].float())
                if h < q_heads + kv_heads:
                    if norm:
                        weight = (q_norm if h < q_heads else k_norm).float()
                        x = torch.nn.functional.rms_norm(x, (dim,), weight, 1e-6)
                    c, s = cos[max(0, start + i)].float(), sin[max(0, start + i)].float()
                    x = x * c + torch.cat([-x[dim // 2 :], x[: dim // 2]]) * s
                if h < q_heads:
                    expected[0][b, i, h] = x
                elif 0 <= start + i < 68:
                    which = 1 if h < q_heads + kv_heads else 2
                    expected[which][b, (h - q_heads) % kv_heads, start + i] = x
    return [qkv, bias, q_norm, k_norm, 1e-6, cos, sin, torch.tensor(starts), keys, values], expected


@pytest.mark.parametrize("new, q_heads, kv_heads, dim, starts, bias, norm", ROPE_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_append(ops, new, q_heads, kv_heads, dim, starts, bias, norm, dtype):
    args, expected = rope_inputs(new, q_heads, kv_heads, dim, starts, bias, norm, dtype)
    ops.rope_append(*args)
    for name, x, y in zip(("q", "keys", "values"), expected, (args[0][:, :, :q_heads], *args[8:])):
        assert_close(name, x, y)


@pytest.mark.parametrize("new, q_heads, kv_heads, dim, starts, bias, norm", ROPE_SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_head, chosen", [(False, 11), (True, 11), (True, 16)])
def test_rope_sparse_attention(ops, new, q_heads, kv_heads, dim, starts, bias, norm, dtype, per_head, chosen):
    """Rotates and stores as rope_append does, and attends as sparse_attention does to the result."""
    args, (q, keys, values) = rope_inputs(new, q_heads, kv_heads, dim, starts, bias, norm, dtype)
    indices = torch.full((len(starts), kv_heads if per_head else 1, chosen), -1, dtype=torch.int32)
    for b, start in enumerate(starts):
        for h in range(indices.shape[1]):
            picked = torch.randperm(max(start, 0), generator=torch.Generator().manual_seed(b + h))[:7]
            indices[b, h, 2 : 2 + len(picked)] = picked.int()
    o = ops.rope_sparse_attention(*args, indices, dim**-0.5)

    def slots(b, h, i):
        own = [s for s in range(starts[b], starts[b] + i + 1) if s >= 0]
        return [s for s in indices[b, h if per_head else 0].tolist() if s >= 0] + own

    expected, _ = literal_attention(q.to(dtype), keys.to(dtype), values.to(dtype), slots, dim**-0.5)
    assert_close("o", expected, o)
    assert_close("keys", keys, args[8])
    assert_close("values", values, args[9])


def test_custom_ops_compile_into_one_graph():
    """torch.compile(fullgraph=True) sees every op: by its fake it knows shapes, by its schema what changes."""
    args, _ = rope_inputs(2, 4, 2, 16, (3, 11), True, False, torch.float32)
    qkv, bias, _, _, eps, cos, sin, start, keys, values = (x.to(DEVICE) if torch.is_tensor(x) else x for x in args)
    indices = torch.tensor([[[0, 2, -1]], [[4, 10, 7]]], dtype=torch.int32, device=DEVICE)
    heads, scores = torch.tensor([0, 1], device=DEVICE), torch.rand(2, 68, device=DEVICE)
    op = {name: getattr(importlib.import_module(f"dustin_hf.kernels.{name}.kernel"), f"{name}_op") for name in OPS}

    def everything(qkv, keys, values, scores):
        op["rope_append"](qkv, bias, None, None, eps, cos, sin, start, keys, values)
        q, k, v = qkv.split([4, 2, 2], dim=2)
        op["kv_append"](keys, values, k.transpose(1, 2), v.transpose(1, 2), start)
        fused = op["rope_sparse_attention"](qkv, bias, None, None, eps, cos, sin, start, keys, values, indices, 0.25)
        op["srh_score"](scores, q[:, :, :2], keys, heads, start, 0 * start + 1, 0.25)
        chosen = op["topk_select"](scores, scores, start, start, 1, 1, 4)[:, None]
        o, lse = op["full_attention"](q, keys, values, start, 0.25)
        p, _ = op["sparse_attention"](q, keys, values, chosen, start, 0.25)
        x = op["rms_norm"]((o + p + fused).flatten(0, 2), cos[0], eps)
        return op["silu_mul"](x, x), lse, keys + 0, scores + 0

    inputs = (qkv, keys, values, scores)
    expected = everything(*[x.clone() for x in inputs])
    compiled = torch.compile(everything, fullgraph=True, backend="aot_eager")
    for i, (x, y) in enumerate(zip(expected, compiled(*[x.clone() for x in inputs]), strict=True)):
        assert_close(str(i), x, y)
