"""Prefill in chunks: the keys and values of stock, no mask anywhere, the user's attention left as it was."""

import pytest
import torch
from helpers import dustin, heads, plain
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, DynamicCache, masking_utils

import dustin_hf
from dustin_hf import DustinCache
from dustin_hf._compat import CACHE_ARG
from dustin_hf.model_patches import attention
from dustin_hf.model_patches.attention import chunk_attention, merge, prefill_attention
from dustin_hf.prefill import DEFAULT_CHUNK, FREE_TOKENS, _groups, held_prefixes, prefill
from dustin_hf.testing import assert_close, left_pad, random_prompts, tiny_model

LENGTHS = [40, 40, 14, 101, 2, 1]
# float64 models still norm in float32
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-6}


def prefilled(model, prompts, chunk=None, cache=None, held=None):
    """The cache of a prefill, with a token more than it holds for each row."""
    sequences = left_pad(prompts)["input_ids"].to(model.device)
    pads = [sequences.shape[1] - len(prompt) for prompt in prompts]
    if cache is None:
        cache = DustinCache(model.config.num_hidden_layers, len(prompts), sequences.shape[1] + 5, model.device)
    with torch.no_grad(), dustin_hf.enable(model):
        prefill(model, cache, sequences, pads, held or [0] * len(prompts), chunk)
    cache.check_integrity()
    assert cache.lengths.tolist() == [len(prompt) - 1 for prompt in prompts]
    return cache


def assert_as_stock(model, prompts, cache, tolerance):
    for row, prompt in enumerate(prompts):
        if len(prompt) == 1:
            continue
        stock = DynamicCache()
        with torch.no_grad():
            model.model(torch.tensor([prompt[:-1]], device=model.device), use_cache=True, **{CACHE_ARG: stock})
        for i, (layer, expected) in enumerate(zip(cache.layers, stock.layers)):
            for name in ("keys", "values"):
                got = getattr(layer, name)[row : row + 1, :, : len(prompt) - 1]
                assert_close(f"row {row} layer {i} {name}", getattr(expected, name), got, tolerance)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("grouping", [(4, 2), (4, 4), (6, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunks_equal_one_forward_and_stock(family, grouping, dtype):
    model = tiny_model(family, **heads(*grouping)).to(dtype)
    prompts = random_prompts(LENGTHS)
    whole = prefilled(model, prompts)
    assert_as_stock(model, prompts, whole, TOLERANCE[dtype])
    for chunk in (1, 7, 64):
        cache = prefilled(model, prompts, chunk)
        for layer, expected in zip(cache.layers, whole.layers):
            assert_close(f"chunks of {chunk}", expected.keys, layer.keys, TOLERANCE[dtype])
            assert_close(f"chunks of {chunk}", expected.values, layer.values, TOLERANCE[dtype])


@pytest.mark.parametrize("grouping", [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("new,start", [(1, 0), (9, 0), (1, 1), (1, 30), (5, 1), (7, 25), (30, 2)])
def test_chunk_attention(grouping, new, start):
    q_heads, kv_heads = grouping
    storage = torch.randn(2, 3, kv_heads, 64, 16, dtype=torch.float64)
    key, value = storage[:, 1:, :, : start + new]  # of two rows of three, and of some of the slots
    query = torch.randn(2, new, q_heads, 16, dtype=torch.float64).transpose(1, 2)
    mask = torch.ones(new, start + new, dtype=torch.bool).tril(start)
    expected = scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    assert_close("chunk", expected, chunk_attention(query, key, value, 0.3), 1e-12)


def plain_attention(query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, *, scale):
    """What cuDNN's operator returns first, with its signature."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if is_causal:  # aligned at the first key
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1, keepdim=True), None


def test_two_parts(monkeypatch):
    """What runs where SDPA prefers cuDNN, with a plain stand-in for its operator."""
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", plain_attention)
    query = torch.randn(2, 6, 9, 16, dtype=torch.float64) * 3
    key, value = torch.randn(2, 2, 2, 40, 16, dtype=torch.float64) * 3
    got = attention._in_two_parts(query, key, value, 0.25)
    assert_close("two parts", chunk_attention(query, key, value, 0.25), got, 1e-12)


def test_merge_of_far_scores():
    """A part that has no weight, by far, changes nothing and makes no NaN."""
    a, b = torch.randn(2, 1, 2, 3, 4)
    low, high = torch.full((1, 2, 3, 1), -1e4), torch.full((1, 2, 3, 1), 1e4)
    assert merge(a, low, b, high).equal(b) and merge(a, high, b, low).equal(a)
    assert_close("equal weights", (a + b) / 2, merge(a, low[..., 0], b, low[..., 0]))


@pytest.fixture
def no_masks(monkeypatch):
    """Every function of transformers that builds a mask fails."""

    def fail(*args, **kwargs):
        raise AssertionError("a mask is built")

    for name in ("sdpa", "eager"):
        monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, name, fail)
    monkeypatch.setattr(masking_utils, "sdpa_mask", fail)
    monkeypatch.setattr(attention, "sdpa_mask", fail)


def test_no_mask(pair, monkeypatch, no_masks):
    seen = []

    def spy(module, query, key, value, attention_mask, **kwargs):
        seen.append((query.shape[2], key.shape[2], attention_mask))
        assert key.untyped_storage().nbytes() > key.nbytes  # the cache's own
        return attention.dustin_attention_forward(module, query, key, value, attention_mask, **kwargs)

    prompts = random_prompts([12, 5])
    sequences = left_pad(prompts)["input_ids"]
    cache = DustinCache(2, 2, 20)
    with torch.no_grad(), dustin_hf.enable(pair.target), monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, attention.ATTENTION_NAME, spy)
        prefill(pair.target, cache, sequences, [0, 7], [0, 0], 7)
    assert seen == [call for sizes in ((7, 7), (4, 11), (4, 4)) for call in [(*sizes, None)] * 2]


@pytest.mark.parametrize("name", ["sdpa", "dustin", "eager", "flash_attention_2", "flex_attention"])
def test_only_sdpa_is_replaced(pair, name):
    configs = {id(m.config): m.config for m in pair.target.modules() if hasattr(m, "config")}.values()
    before = pair.target.config._attn_implementation
    try:
        for config in configs:
            config._attn_implementation = name
        with prefill_attention(pair.target):
            expected = attention.ATTENTION_NAME if name in ("sdpa", "dustin") else name
            assert {config._attn_implementation for config in configs} == {expected}
        assert {config._attn_implementation for config in configs} == {name}
    finally:
        for config in configs:
            config._attn_implementation = before


def test_restored(pair):
    prompts = random_prompts([20, 9])
    assert pair.target.config._attn_implementation == "sdpa"
    during = []

    def note(module, args):
        during.append(pair.target.config._attn_implementation)
        if len(during) == 4:
            raise KeyboardInterrupt

    hook = pair.target.model.layers[1].register_forward_pre_hook(note)
    try:
        prefilled(pair.target, prompts)
        assert pair.target.config._attn_implementation == "sdpa"
        cache = DustinCache(2, 2, 25)
        with pytest.raises(KeyboardInterrupt):
            prefilled(pair.target, prompts, 7, cache)
    finally:
        hook.remove()
    assert during == [attention.ATTENTION_NAME] * 4
    assert pair.target.config._attn_implementation == "sdpa"
    cache.check_integrity()
    assert_as_stock(pair.target, prompts, prefilled(pair.target, prompts, 7, cache), 1e-5)


def test_eager_stays_eager(family):
    model = tiny_model(family, attn_implementation="eager")
    during = []
    model.model.layers[0].register_forward_pre_hook(lambda *args: during.append(model.config._attn_implementation))
    prompts = random_prompts(LENGTHS)
    cache = prefilled(model, prompts, 7)
    assert set(during) == {"eager"}
    assert_as_stock(model, prompts, cache, 1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("free", [0, 50, 400])
def test_held_and_shared_starts(pair, chunk, free, monkeypatch):
    """Rows go on from what they hold, each from its own length, and a shared start is copied."""
    monkeypatch.setitem(FREE_TOKENS, "cpu", free)
    document = random_prompts([90], seed=5)[0]
    first = [document[:30], document[:80], document[:5]]
    cache = prefilled(pair.target, first, chunk, DustinCache(2, 3, 120))
    cache.tokens = torch.tensor([document[:85]] * 3)
    second = [document[:25] + [7, 8, 9], document + [3, 4], document + [5]]
    sequences = left_pad(second)["input_ids"]
    held = held_prefixes(cache, sequences, [sequences.shape[1] - len(prompt) for prompt in second])
    assert held == [25, 79, 4]
    prefilled(pair.target, second, chunk, cache, held)
    assert_as_stock(pair.target, second, cache, 1e-5)


def test_rows_that_fit_a_forward_go_together():
    def groups(spans, chunk, free):
        return [(rows.start, rows.stop, *span) for rows, span in _groups(spans, chunk, free)]

    assert groups([(0, 511)] * 16, DEFAULT_CHUNK["cuda"], 0) == [(0, 16, 0, 511)]
    spans = [(0, 20), (0, 20), (0, 20), (0, 21), (5, 21), (5, 21)]
    assert groups(spans, 40, 0) == [(0, 2, 0, 20), (2, 3, 0, 20), (3, 4, 0, 21), (4, 6, 5, 21)]
    # rows of other lengths as far as their tokens, and those behind their ends, are free
    assert groups(spans, 40, 42) == [(0, 2, 0, 20), (2, 4, 0, 21), (4, 6, 5, 21)]
    assert groups(spans, 100, 84) == [(0, 4, 0, 21), (4, 6, 5, 21)]
    assert groups([(0, 3), (0, 90), (0, 4), (0, 0), (0, 2)], 100, 60) == [(0, 1, 0, 3), (1, 2, 0, 90), (2, 5, 0, 4)]


def test_short_rows_of_other_lengths_go_together(pair, monkeypatch):
    """The same keys, values and texts in fewer forwards."""
    prompts = random_prompts([40, 33, 14, 101, 2, 1, 60, 61])
    alone = [plain(pair.target, prompt) for prompt in prompts]
    forwards = []
    with pair.target.model.register_forward_pre_hook(lambda *_: forwards.append(1)):
        prefilled(pair.target, prompts)
        assert len(forwards) == 7  # none for the row of one token
        monkeypatch.setitem(FREE_TOKENS, "cpu", 130)
        forwards.clear()
        cache = prefilled(pair.target, prompts)
        assert len(forwards) == 4  # 40 + 33 + 14, 101, 2 + 1, 60 + 61
    assert_as_stock(pair.target, prompts, cache, 1e-5)
    rows, _ = dustin(pair.target, pair.S, prompts)
    assert [row[: len(expected)] for row, expected in zip(rows, alone)] == alone  # pads after an end
