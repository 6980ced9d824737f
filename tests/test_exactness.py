"""Invariants 2 and 3: at full budget the text of plain generate; at every budget rows do not know their neighbours."""

import pytest
import torch
from helpers import assert_rows_equal_plain, dustin, heads, padded, plain

from dustin_hf.testing import noisy_copy, random_prompts, tiny_model

GROUPINGS = {1: (4, 4), 2: (4, 2), 6: (6, 1), 7: (14, 2)}
LENGTHS = {1: [37], 3: [200, 1, 64], 8: [5, 17, 1, 64, 64, 2, 120, 33]}


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("group", GROUPINGS)
@pytest.mark.parametrize("gamma", [1, 3, 4, 7])
def test_full_budget_equals_plain_generate(pairs, family, kind, group, gamma):
    pair = pairs(family, **heads(*GROUPINGS[group], head_dim=16))
    batch = {1: 1, 3: 3, 4: 8, 7: 3}[gamma]
    prompts = random_prompts(LENGTHS[batch], seed=gamma)
    assert_rows_equal_plain(pair.target, pair.drafts[kind], prompts, gamma=gamma, new=17)


@pytest.mark.parametrize("budget", [21, 32, 80, 100_000])
@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_a_row_alone_equals_the_row_in_a_batch(pair, kind, budget):
    prompts = random_prompts(LENGTHS[8], seed=budget)
    draft = pair.drafts[kind]
    together, _ = dustin(pair.target, draft, prompts, budget=budget, gamma=3)
    alone = [dustin(pair.target, draft, [prompt], budget=budget, gamma=3)[0][0] for prompt in prompts]
    assert together == padded(alone, len(together[0]))


@pytest.mark.parametrize("mode", ["hybrid", "target", "draft", "full"])
def test_permuting_rows_permutes_outputs_p07(pair, mode):
    """P-07: half the rows repeat a pattern, half are random, so that they accept different amounts."""
    prompts = [[7, 8, 9] * n for n in (8, 15, 22, 30)] + random_prompts([9, 50, 70, 90])
    order = [5, 0, 7, 2, 1, 4, 6, 3]
    first, out = dustin(pair.target, pair.M, prompts, budget=32, config={"mode": mode})
    second, _ = dustin(pair.target, pair.M, [prompts[i] for i in order], budget=32, config={"mode": mode})
    assert second == [first[i] for i in order]
    assert len({tuple(row) for row in out.stats.committed}) > 1


def test_ragged_acceptance_p06(pair):
    """P-06, P-07: the accepted counts really differ, and every row is right."""
    out = assert_rows_equal_plain(pair.target, pair.M, random_prompts([3, 17, 64, 65]), new=40)
    assert len({tuple(row) for row in out.stats.committed}) > 1
    assert {1, 5} <= set(out.stats.histogram)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_never_reaches_a_row_p08(pair, attention):
    """P-08: pads from 0 to 40, widths that are 0 and 1 modulo 32, and every logit of verification is finite."""
    seen = []
    hook = pair.target.lm_head.register_forward_hook(lambda module, args, out: seen.append(out.isfinite().all()))
    before = pair.target.config._attn_implementation
    pair.target.set_attn_implementation(attention)
    try:
        for longest in (64, 65):
            assert_rows_equal_plain(pair.target, pair.M, random_prompts([longest - p for p in (0, 1, 13, 31, 32, 40)]))
    finally:
        pair.target.set_attn_implementation(before)
        hook.remove()
    assert seen and all(seen)


def test_positions_run_on_from_the_real_length_p11(pair):
    seen = []
    hook = pair.target.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((kwargs.get("position_ids", args[-1])).clone()), with_kwargs=True
    )
    prompts = random_prompts([5, 12])
    _, out = dustin(pair.target, pair.M, prompts, gamma=3, new=12)
    hook.remove()
    blocks = [p for p in seen if p.shape == (2, 4)]  # verification of gamma + 1
    assert len(seen) >= 2 + len(blocks) and len(blocks) >= 3
    at = [len(p) - 1 for p in prompts]
    for step, block in enumerate(blocks):
        for row in range(2):
            if step < len(out.stats.committed[row]):
                assert block[row].tolist() == list(range(at[row], at[row] + 4))
                at[row] += out.stats.committed[row][step]
    assert any(n < 4 for row in out.stats.committed for n in row)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("do_sample", [False, True])
def test_padded_vocabularies_of_two_sizes_p23(family, swap, do_sample):
    big, small = tiny_model(family, 0, vocab_size=168), tiny_model(family, 0, vocab_size=160)
    target, draft = (small, big) if swap else (big, small)
    with torch.no_grad():
        small.model.embed_tokens.weight.copy_(big.model.embed_tokens.weight[:160])
    prompts = random_prompts([4, 30], high=min(target.config.vocab_size, 168))
    if do_sample:
        torch.manual_seed(0)
        rows, _ = dustin(target, draft, prompts, do_sample=True, new=40)
        assert all(0 <= token < target.config.vocab_size for row in rows for token in row)
    else:
        assert_rows_equal_plain(target, draft, prompts, new=30)


@pytest.mark.parametrize("tied_target", [True, False])
@pytest.mark.parametrize("tied_draft", [True, False])
def test_tied_and_untied_heads_p24(family, tmp_path, tied_target, tied_draft):
    models = []
    for seed, tied in ((0, tied_target), (1, tied_draft)):
        tiny_model(family, seed, tie_word_embeddings=tied).save_pretrained(tmp_path / str(seed))
        models.append(type(tiny_model(family)).from_pretrained(tmp_path / str(seed)).eval())
    assert_rows_equal_plain(*models, random_prompts([3, 20]), new=12)


def test_head_dim_of_the_config_p25(pairs, family):
    pair = pairs(family, **heads(4, 2, head_dim=32))
    out = assert_rows_equal_plain(pair.target, pair.M, random_prompts([3, 20]), new=12)
    cache = out.get("cache", out.get("past_key_values"))
    assert cache.layers[0].keys.shape[1::2] == (2, 32)


@pytest.mark.parametrize("q_heads,kv_heads", [(14, 2), (6, 2), (5, 1), (12, 4), (28, 4), (3, 3), (96, 6)])
def test_groups_that_are_no_power_of_two_p26(pairs, family, q_heads, kv_heads):
    pair = pairs(family, **heads(q_heads, kv_heads))
    assert_rows_equal_plain(pair.target, pair.M, random_prompts([3, 20]), new=12)


def test_batches_of_changing_shape_p31(pair):
    calls = [([100, 3, 50, 7], 12), ([10, 9], 20), ([200, 1, 5, 64, 20, 30], 8), ([100, 3, 50, 7], 12)]
    results = [dustin(pair.target, pair.M, random_prompts(lengths), budget=40, new=new)[0] for lengths, new in calls]
    assert results[0] == results[3]
    fresh = tiny_model(pair.target.config.model_type)
    for (lengths, new), result in zip(calls, results):
        prompts = random_prompts(lengths)
        assert result == dustin(fresh, noisy_copy(fresh, 0.05), prompts, budget=40, new=new)[0]


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_prompts_around_the_budget_p37(pair, kind):
    """P-37: rows that fit the budget whole are exact, whatever is beside them."""
    budget, new = 40, 9
    lengths = [1, 2, 3, 15, 16, 17, 20, 21, budget - new - 1, budget - new, budget - 1, budget, budget + 1, 90]
    prompts = random_prompts(lengths)
    rows, _ = dustin(pair.target, pair.drafts[kind], prompts, budget=budget, new=new)
    for prompt, row in zip(prompts, rows):
        if len(prompt) + new <= budget:
            expected = plain(pair.target, prompt, new=new)
            assert row[: len(expected)] == expected


def test_causal_frontier_in_a_block_p46(pair):
    """P-46: unpadded rows (the mask becomes None) in storage much longer than the rows."""
    for attention in ("sdpa", "eager"):
        before = pair.target.config._attn_implementation
        pair.target.set_attn_implementation(attention)
        try:
            assert_rows_equal_plain(pair.target, pair.M, random_prompts([20, 20]), new=60)
        finally:
            pair.target.set_attn_implementation(before)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks(pair, chunk):
    assert_rows_equal_plain(pair.target, pair.M, random_prompts([100, 64, 65]), prefill_chunk_size=chunk)


def test_streaming_draft_cache_keeps_full_budget_exact(pair):
    """The draft's cache changes acceptance, never the text."""
    prompts = random_prompts([90, 40])
    rows, out = dustin(pair.target, pair.S, prompts, config={"draft_cache": "streaming", "mode": "full"}, budget=24)
    assert rows == [plain(pair.target, prompt) for prompt in prompts]
    assert out.stats.tau < dustin(pair.target, pair.S, prompts)[1].stats.tau


def test_several_return_sequences_are_rows_of_their_own(pair):
    torch.manual_seed(0)
    rows, out = dustin(pair.target, pair.M, random_prompts([4, 20]), do_sample=True, num_return_sequences=3, new=10)
    assert len(rows) == 6 and len(out.stats.committed) == 6
    assert len({tuple(row) for row in rows}) > 2
