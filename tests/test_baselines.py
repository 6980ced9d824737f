"""Baselines against loops that are slower still, and through `generate`."""

import math

import pytest
import torch
from helpers import assert_rows_equal_plain, dustin, heads
from test_recovery import dense_rows

import dustin_hf
from dustin_hf.cache import DustinCache
from dustin_hf.eval.baselines import (
    BASELINES,
    OraclePolicy,
    QuestPolicy,
    SnapKVPolicy,
    SpecAttnPolicy,
    naive_profile,
    register_baselines,
    registered_baselines,
)
from dustin_hf.prefill import prefill
from dustin_hf.selection import Signals, policy_names
from dustin_hf.testing import left_pad, noisy_copy, random_prompts, tiny_model

LENGTHS = (1, 15, 16, 17, 60)


@pytest.fixture
def registered():
    with registered_baselines():
        yield


def inputs(q_heads=4, kv_heads=2, new=3, dim=8, capacity=70):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(len(LENGTHS), new, q_heads, dim, generator=generator)
    keys = torch.randn(len(LENGTHS), kv_heads, capacity, dim, generator=generator)
    for row, length in enumerate(LENGTHS):
        keys[row, :, length:] = 1e4  # stale slots must not count
    return q, keys, torch.tensor(LENGTHS)


def test_quest_reads_the_pages_with_the_largest_shares_of_bounds():
    q, keys, lengths = inputs()
    counts, scale = torch.tensor([3, 1, 2, 3, 2]), 0.3
    policy = QuestPolicy(35, scale, page=8, dense_layers=2)  # four pages
    assert policy._choose(counts, 1, q, keys, lengths) is None
    chosen = policy._choose(counts, 2, q, keys, lengths)
    for row, length in enumerate(LENGTHS):
        for head in range(2):
            pages = range(math.ceil(length / 8))
            held = [keys[row, head, page * 8 : min(page * 8 + 8, length)] for page in pages]
            shares = [0.0] * len(held)
            for one in q[row, : counts[row], 2 * head : 2 * head + 2].flatten(0, 1):
                bounds = [
                    sum(max(x * low, x * high) for x, low, high in zip(one, part.amin(0), part.amax(0)))
                    for part in held
                ]
                whole = sum(math.exp(scale * bound) for bound in bounds)
                shares = [share + math.exp(scale * bound) / whole for share, bound in zip(shares, bounds)]
            best = sorted(pages, key=lambda page: (page != pages[-1], -shares[page]))[:4]
            expected = [slot for page in sorted(best) for slot in range(page * 8, page * 8 + 8) if slot < length]
            assert [slot for slot in chosen[row, head].tolist() if slot >= 0] == expected
    with pytest.raises(ValueError, match="must hold a page of 16 slots for Quest, got 12"):
        QuestPolicy(12, 1.0)


def test_the_oracle_reads_what_the_block_attends_to_most():
    q, keys, lengths = inputs()
    counts = [3, 1, 2, 3, 2]
    chosen = OraclePolicy(9, 0.5)._choose(torch.tensor(counts), 0, q, keys, lengths)
    for row, length in enumerate(LENGTHS):
        total = torch.zeros(length)
        for token in range(counts[row]):
            for head in range(4):
                total += torch.softmax(keys[row, head // 2, :length] @ q[row, token, head] * 0.5, 0)
        expected = sorted(total.topk(min(9, length)).indices.tolist())
        assert [slot for slot in chosen[row, 0].tolist() if slot >= 0] == expected


def test_snapkv_keeps_what_the_end_of_the_prompt_attends_to():
    target = tiny_model("qwen2", **heads(6, 2), num_hidden_layers=2)
    prompts = random_prompts([41, 9, 30])
    policy = SnapKVPolicy(12, window=4, kernel=3)
    cache = DustinCache(2, 3, 60)
    pads = [41 - len(ids) for ids in prompts]
    with dustin_hf.enable(target):
        prefill(target, cache, left_pad(prompts)["input_ids"], pads, [0] * 3)
    tail = torch.tensor([([0] * 4 + ids[:-1])[-4:] for ids in prompts])
    before = [layer.keys.clone() for layer in cache.layers]
    policy.begin(target, cache, tail)
    for layer, keys in zip(cache.layers, before):
        assert torch.equal(layer.keys, keys)
    for row, ids in enumerate(prompts):
        length = len(ids) - 1
        shares = dense_rows(target, ids[:-1])  # [layers, HQ, length, length]
        for layer in range(2):
            for head in range(2):
                if length <= 12:
                    expected = list(range(length))
                else:
                    group = shares[layer, 3 * head : 3 * head + 3, length - 4 :, : length - 4].mean((0, 1)).tolist()
                    smooth = [max(group[max(0, i - 1) : i + 2]) for i in range(length - 4)]
                    # of slots that share a maximum the earlier ones
                    best = sorted(range(length - 4), key=lambda i: -smooth[i])[:8]
                    expected = sorted(best) + list(range(length - 4, length))
                assert [slot for slot in policy.slots[layer, row, head].tolist() if slot >= 0] == expected
    # later: the same slots, and every token since
    cache.lengths = cache.lengths + torch.tensor([2, 0, 5])
    picked = policy.select(signals_of(cache)).indices
    for row, new in enumerate((2, 0, 5)):
        length = len(prompts[row]) - 1
        for layer in range(2):
            got = [slot for slot in picked[layer, row, 1].tolist() if slot >= 0]
            kept = [slot for slot in policy.slots[layer, row, 1].tolist() if slot >= 0]
            assert got == kept + list(range(length, length + new))
    with pytest.raises(ValueError, match="above the 32 tokens that observe for SnapKV, got 32"):
        SnapKVPolicy(32)


def signals_of(cache, draft_cache=None, queries=None, counts=None):
    lengths = cache.lengths.clone()
    counts = lengths if counts is None else counts
    return Signals(lengths, cache, {}, draft_cache or cache, queries or {}, counts, counts + 1)


def test_specattn_follows_each_layer_of_the_draft():
    generator = torch.Generator().manual_seed(1)
    lengths, counts = torch.tensor([30, 11, 40]), torch.tensor([3, 2, 1])
    cache, draft_cache = DustinCache(5, 3, 48), DustinCache(2, 3, 50)
    for layer in (*cache.layers, *draft_cache.layers):
        layer.lazy_initialization(*[torch.zeros(3, 2, 1, 8)] * 2)
        layer.keys.normal_(generator=generator)
    cache.lengths = lengths
    queries = {layer: torch.randn(3, 3, 4, 8, generator=generator) for layer in range(2)}
    policy = SpecAttnPolicy(10, 1, 3, 5, {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}, 2, 0.4)
    picked = policy.select(signals_of(cache, draft_cache, queries, counts))
    assert picked.layer_sets == (0, 0, 0, 1, 1)
    for layer in range(2):
        for row, length in enumerate(lengths.tolist()):
            total = torch.zeros(length)
            for token in range(int(counts[row])):
                for head in range(4):
                    keys = draft_cache.layers[layer].keys[row, head // 2, :length]
                    total += torch.softmax(keys @ queries[layer][row, token, head] * 0.4, 0)
            kept = {0, *range(length - 3, length)}
            rest = sorted((i for i in range(length) if i not in kept), key=lambda i: -total[i])
            expected = sorted([*kept, *rest[:6]])
            assert picked.indices[layer, row, 0].tolist() == expected


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_a_budget_for_everything_is_exact(name, registered):
    target = tiny_model("qwen2", **heads(4, 2), num_hidden_layers=3)
    draft = noisy_copy(target, 0.1)
    assert_rows_equal_plain(target, draft, random_prompts([40, 9, 23]), budget=160, config={"mode": name})


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_rows_of_a_small_budget_are_independent(name, registered):
    target = tiny_model("llama", **heads(4, 2), num_hidden_layers=3)
    target.generation_config.eos_token_id = None
    draft, prompts = noisy_copy(target, 0.1), random_prompts([90, 70, 81])
    options = {"budget": 48, "config": {"mode": name}, "new": 20}
    rows, together = dustin(target, draft, prompts, **options)
    for prompt, row in zip(prompts, rows):
        assert dustin(target, draft, [prompt], **options)[0] == [row]
    assert 0.3 < together.stats.kv_read_share < 0.95


def test_the_naive_estimator_has_all_heads(registered):
    target = tiny_model("llama", num_hidden_layers=3)
    profile = naive_profile(target.config, tiny_model("llama").config)
    assert profile.target_heads == {layer: (0, 1, 2, 3) for layer in range(3)} and list(profile.draft_heads) == [0, 1]
    before = policy_names()
    register_baselines()  # twice is as good as once
    with registered_baselines():
        assert policy_names() == before
    assert policy_names() == before  # what was there before stays


def test_baselines_are_registered_for_a_while():
    before = policy_names()
    with registered_baselines():
        assert set(policy_names()) == {*before, *BASELINES}
    assert policy_names() == before
