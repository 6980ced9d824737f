"""Prefill on CUDA devices, by hand: `pytest -m gpu`. Fast kernels for every chunk, stock's results, little memory."""

import gc

import pytest
import torch
from transformers import DynamicCache

import dustin_hf
from dustin_hf import DustinCache
from dustin_hf._compat import CACHE_ARG
from dustin_hf.model_patches import attention
from dustin_hf.prefill import prefill
from dustin_hf.testing import TOLERANCE, assert_close, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def kernels_of(run):
    """Names of the CUDA kernels that `run` launches."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return [event.key for event in profiler.key_averages()]


@pytest.mark.parametrize("grouping", [(14, 2), (8, 8)])
@pytest.mark.parametrize("dim", [64, 128, 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("long", [16, 4096])
def test_chunk_attention(monkeypatch, grouping, dim, dtype, long):
    """Chunks at any place: by the flash kernel, by cuDNN in two parts where SDPA prefers it, by what else there is."""
    monkeypatch.setattr(attention, "LONG", long)
    torch.manual_seed(0)
    for new, start in ((1, 0), (300, 0), (1, 500), (257, 16), (256, 512), (100, 777)):
        storage = torch.randn(2, 3, grouping[1], 1500, dim, device="cuda", dtype=dtype)
        key, value = storage[:, 1:, :, : start + new]
        query = torch.randn(2, new, grouping[0], dim, device="cuda", dtype=dtype).transpose(1, 2)
        k, v = (x.double().repeat_interleave(grouping[0] // grouping[1], dim=1) for x in (key, value))
        scores = query.double() @ k.transpose(2, 3) * 0.2
        unseen = torch.ones(new, start + new, dtype=torch.bool, device="cuda").triu(start + 1)
        expected = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ v
        got = attention.chunk_attention(query, key, value, 0.2)
        assert got.dtype == dtype
        # float32: three products of TF32 parts each
        limit = 5e-5 if dtype == torch.float32 else TOLERANCE[dtype]
        assert_close(f"{new} after {start}", expected, got.double(), limit)


@pytest.mark.parametrize("long", [16, 4096])
def test_later_chunks_run_fast_kernels(monkeypatch, long):
    monkeypatch.setattr(attention, "LONG", long)
    key, value = torch.randn(2, 2, 4, 3000, 128, device="cuda", dtype=torch.bfloat16)[..., :2048, :]
    query = torch.randn(2, 28, 512, 128, device="cuda", dtype=torch.bfloat16)
    names = kernels_of(lambda: attention.chunk_attention(query, key, value, 0.1))
    if long == 16 and attention._prefers_cudnn(query, key, value, 0.1):
        assert any("cudnn" in name for name in names), names
    else:
        assert any("flash_fwd" in name for name in names), names
    assert not any("gemm" in name or "softmax" in name for name in names), names


def mid_size(dtype=torch.bfloat16):
    """Wide in heads and short in all else, so that a mask or keys for every query head would show."""
    options = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 16, "head_dim": 64}
    return tiny_model("qwen3", **options, max_position_embeddings=2**16, initializer_range=0.05).to("cuda", dtype)


def prefilled(model, ids, chunk):
    cache = DustinCache(model.config.num_hidden_layers, len(ids), ids.shape[1] + 8, "cuda")
    with torch.no_grad(), dustin_hf.enable(model):
        prefill(model, cache, ids, [0] * len(ids), [0] * len(ids), chunk)
    return cache


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_prefill_in_chunks_equals_stock(dtype):
    model = mid_size(dtype)
    ids = torch.randint(3, 160, (2, 12_001), device="cuda")
    stock = DynamicCache()
    with torch.no_grad():
        model.model(ids[:, :-1], use_cache=True, **{CACHE_ARG: stock})
    for chunk in (None, 512, 1000, 5000):
        cache = prefilled(model, ids, chunk)
        for layer, expected in zip(cache.layers, stock.layers):
            assert_close(f"keys, chunks of {chunk}", expected.keys, layer.keys[:, :, :12_000], 2e-2)
            assert_close(f"values, chunks of {chunk}", expected.values, layer.values[:, :, :12_000], 2e-2)


def test_memory_of_prefill():
    """Later chunks of a long row need neither a mask nor keys and values for every query head."""
    model = mid_size()
    ids = torch.randint(3, 160, (1, 32_769), device="cuda")
    for chunk in (4096, 2048):
        prefilled(model, ids[:, : 3 * chunk], chunk)  # workspaces stay allocated
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cache = prefilled(model, ids, chunk)
        used = torch.cuda.max_memory_allocated() - before - cache.nbytes
        mask, repeated = chunk * 32_768, 2 * 16 * 32_768 * 64 * 2
        print(f"chunks of {chunk}: {used / 2**20:.0f} MiB; mask {mask / 2**20:.0f}, repeated {repeated / 2**20:.0f}")
        assert used < min(mask, repeated)
        del cache
