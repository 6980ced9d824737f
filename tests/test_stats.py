"""GenerationStats: counts that add up, and the share of the cache that verification reads."""

import json

import pytest
from helpers import dustin

from dustin_hf import DustinProfile
from dustin_hf.eval.fidelity import agreement
from dustin_hf.testing import random_prompts


def test_counts_add_up(pair):
    prompts = random_prompts([9, 60, 30])
    rows, out = dustin(pair.target, pair.M, prompts, gamma=3, new=30, eos_token_id=None)
    stats = out.stats
    assert stats.new_tokens == [30, 30, 30] and stats.num_assistant_tokens == 3 and stats.backend == "eager"
    assert stats.target_calls == max(map(len, stats.committed))
    assert stats.draft_calls <= 3 * stats.target_calls
    assert stats.tau == pytest.approx(90 / sum(map(len, stats.committed)))
    assert stats.tau_per_row == [pytest.approx(30 / len(row)) for row in stats.committed]
    assert sum(stats.histogram.values()) == sum(map(len, stats.committed))
    assert all(n - 1 <= 3 for row in stats.committed for n in row)
    assert set(stats.seconds) == {"prefill", "draft", "select", "verify", "accept"}
    assert all(spent > 0 for spent in stats.seconds.values())
    assert json.loads(json.dumps(stats.to_dict()))["options"]["budget"] == 100_000
    assert stats.kv_read_share == 1.0 and stats.kv_bytes_read == stats.kv_bytes_full


def test_share_of_the_cache_p42(pair):
    """P-42: the sparse path really runs: about budget / length of the cache is read."""
    length, budget, gamma = 400, 40, 1
    _, out = dustin(pair.target, pair.D, random_prompts([length]), budget=budget, gamma=gamma, new=40)
    stats = out.stats
    (committed,) = stats.committed
    full = read = 0
    at = length - 1
    for step, n in enumerate(committed):
        block = min(gamma, 40 - sum(committed[:step]) - 1) + 1
        full += at + block
        read += (at if step == 0 else budget) + block
        at += n
    assert stats.kv_tokens_full == [full] and stats.kv_tokens_read == [read]
    assert stats.kv_read_share == pytest.approx(read / full) and stats.kv_read_share < 0.2
    assert stats.kv_bytes_read == read * stats.kv_bytes_per_token


def test_agreement(pair):
    prompt = random_prompts([60])[0]
    _, out = dustin(pair.target, pair.M, [prompt], new=30, eos_token_id=None)
    assert agreement(pair.target, out.sequences[0], 60) == 1.0
    changed = out.sequences[0].clone()
    changed[-1] = (changed[-1] + 1) % 160
    assert agreement(pair.target, changed, 60) == pytest.approx(29 / 30)
    _, sparse = dustin(pair.target, pair.M, [prompt], new=30, budget=21, eos_token_id=None)
    assert agreement(pair.target, sparse.sequences[0], 60) < 1.0
    assert agreement(pair.target, out.sequences[0, :60], 60) == 1.0


@pytest.mark.parametrize(
    "config, drafted",
    [
        ({}, "sparse"),
        ({"mode": "target"}, "full"),
        ({"draft_cache": "streaming"}, "streaming"),
        ({"budget": 100_000}, "full"),
    ],
)
def test_what_was_used_is_said(pair, config, drafted):
    profile, prompts = DustinProfile({1: (0,)}, {1: (0,)}), random_prompts([12, 60])
    for given, source in ((None, "default"), (profile, "given")):
        _, out = dustin(pair.target, pair.M, prompts, config={"budget": 32, **config}, new=4, profile=given)
        assert (out.stats.draft_cache, out.stats.profile) == (drafted, source)
    _, out = dustin(pair.target, None, prompts, new=4, prompt_lookup_num_tokens=3)
    assert out.stats.draft_cache is None
