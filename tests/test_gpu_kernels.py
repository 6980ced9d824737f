"""Kernels on a CUDA device, by hand: storage beyond 2^31 elements, and how many variants get compiled."""

import pytest
import torch

from dustin_hf.kernels.full_attention import full_attention
from dustin_hf.kernels.kv_append import kv_append
from dustin_hf.kernels.rope_sparse_attention import rope_sparse_attention
from dustin_hf.kernels.sparse_attention import sparse_attention
from dustin_hf.kernels.srh_score import naive_srh_score, srh_score
from dustin_hf.kernels.topk_select import naive_topk_select, topk_select
from dustin_hf.testing import assert_close

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def attention(q, k, v, slots, scale):
    """Of one row `q [L, HQ, D]` over some slots, everything visible but later tokens of the block."""
    new, q_heads, _ = q.shape
    group = q_heads // k.shape[0]
    k, v = (x[:, slots].float().repeat_interleave(group, 0) for x in (k, v))
    scores = torch.einsum("lhd,htd->hlt", q.float(), k) * scale
    hidden = torch.ones(new, new, device=q.device, dtype=torch.bool).triu(1)
    scores[:, :, -new:].masked_fill_(hidden, float("-inf"))
    return torch.einsum("hlt,htd->lhd", scores.softmax(-1), v)


def test_beyond_2_31_elements_p48():
    """P-48: the last row of a cache of 16 x 8 x 131,073 x 128 elements, through every kernel that touches it."""
    batch, heads, capacity, dim, new, group = 16, 8, 131_073, 128, 2, 4
    keys, values = (torch.zeros(batch, heads, capacity, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    assert keys.numel() > 2**31
    generator = torch.Generator("cuda").manual_seed(0)
    for x in (keys, values):
        x[-1].normal_(generator=generator)
    start = torch.full((batch,), capacity - new, device="cuda")
    q = torch.randn(batch, new, heads * group, dim, dtype=torch.bfloat16, device="cuda", generator=generator)
    block = [torch.randn(batch, heads, new, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    kv_append(keys, values, *block, start)
    assert torch.equal(keys[-1, :, -new:], block[0][-1]) and torch.equal(values[-1, :, -new:], block[1][-1])

    scale = dim**-0.5
    everything = torch.arange(capacity, device="cuda")
    o, _ = full_attention(q, keys, values, start, scale)
    assert_close("full", attention(q[-1], keys[-1], values[-1], everything, scale), o[-1])
    slots = torch.randperm(capacity - new, device="cuda")[:512].sort().values
    indices = slots.int().expand(batch, 1, -1).contiguous()
    expected = attention(q[-1], keys[-1], values[-1], torch.cat([slots, everything[-new:]]), scale)
    assert_close("sparse", expected, sparse_attention(q, keys, values, indices, start, scale)[0][-1])

    scores = torch.zeros(batch, capacity, device="cuda")
    kv_heads, ones = torch.tensor([0, 7], device="cuda"), torch.ones_like(start)
    args = (kv_heads, start, ones, scale)
    srh_score(scores, q[:, :1, :2], keys, *args)
    expected = torch.zeros(1, capacity, device="cuda")
    naive_srh_score(expected, q[-1:, :1, :2], keys[-1:], kv_heads, start[-1:], ones[-1:], scale)
    assert_close("scores", expected[0], scores[-1], tolerance=1e-2)
    chosen = topk_select(scores, scores, start, 0 * start, 4, 16, 512)
    assert set(scores[-1, : capacity - new].topk(300).indices.tolist()) <= set(chosen[-1].tolist())

    identity = torch.ones(8, dim, dtype=torch.bfloat16, device="cuda")  # cos 1, sin 0: no rotation
    qkv = torch.cat([q, *(x.transpose(1, 2) for x in block)], dim=2)
    rope = (qkv, None, None, None, 1e-6, identity, 0 * identity, start, keys, values)
    o = rope_sparse_attention(*rope, indices, scale)
    assert_close("fused", attention(q[-1], keys[-1], values[-1], torch.cat([slots, everything[-new:]]), scale), o[-1])


def test_variants_p51():
    """P-51: lengths compile nothing new, storage sizes little, batch sizes a few variants; long blocks one."""
    from dustin_hf.kernels.split_attention import full_attention_kernel, sparse_attention_kernel

    def variants():
        kernels = (full_attention_kernel, sparse_attention_kernel)
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def run(batch, capacity, length):
        k = torch.zeros(batch, 2, capacity, 64, dtype=torch.bfloat16, device="cuda")
        q = torch.zeros(batch, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
        start = torch.full((batch,), length, device="cuda")
        full_attention(q, k, k, start, 1.0)
        sparse_attention(q, k, k, torch.zeros(batch, 1, 64, dtype=torch.int32, device="cuda"), start, 1.0)

    run(4, 512, 100)
    before = variants()
    for length in range(100, 400, 7):
        run(4, 512, length)
    assert variants() == before
    for batch in range(1, 10):
        for capacity in (448, 512, 576, 1088):
            run(batch, capacity, 100)
    assert variants() - before <= 24

    k, start = torch.zeros(2, 2, 512, 64, dtype=torch.bfloat16, device="cuda"), torch.full((2,), 100, device="cuda")
    before = variants()
    for new in range(65, 100):  # offline, answers and windows of any length are one block
        full_attention(torch.zeros(2, new, 4, 64, dtype=torch.bfloat16, device="cuda"), k, k, start, 1.0)
    assert variants() - before == 1


@pytest.mark.parametrize("k", [4097, 8192, 8193, 20000])
def test_large_budgets(k):
    """Beyond what a tile may hold torch sorts, inside a captured step too."""
    length = torch.tensor([30_000, 8_193, 700], device="cuda")
    draft, target = torch.rand(2, 3, 30_000, device="cuda")
    quota = torch.tensor([3000, 0, 5], device="cuda")
    expected = naive_topk_select(draft, target, length, quota, 4, 16, k)
    assert torch.equal(topk_select(draft, target, length, quota, 4, 16, k), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = topk_select(draft, target, length, quota, 4, 16, k)
    graph.replay()
    assert torch.equal(found, expected)
