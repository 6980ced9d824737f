"""Where rows end: end ids anywhere in a block, limits, minimum lengths, other criteria; each row by itself."""

import pytest
import torch
from helpers import assert_rows_equal_plain, dustin, plain
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from dustin_hf.testing import left_pad, random_prompts


@pytest.mark.parametrize("kind", ["S", "M", "self"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("position", range(5))
def test_end_id_anywhere_in_a_block_p01(pair, kind, batch, position):
    """P-01: the end id stands at each index of a verified block in turn."""
    prompts = random_prompts([12, 30, 7][:batch], seed=1)
    greedy = plain(pair.target, prompts[0], eos_token_id=None)
    block = next(i for i in range(0, 20, 5) if greedy[i + position] not in greedy[: i + position])
    end = greedy[block + position]
    out = assert_rows_equal_plain(
        pair.target, pair.drafts[kind], prompts, gamma=4, eos_token_id=end, pad_token_id=0, new=24
    )
    row = out.sequences[0, max(map(len, prompts)) :].tolist()
    assert row[block + position] == end and not any(row[block + position + 1 :])
    assert out.stats.new_tokens[0] == block + position + 1


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6, 17])
@pytest.mark.parametrize("batch", [1, 4])
def test_limit_inside_a_block_p03(pair, new, batch):
    prompts = random_prompts([9, 20, 1, 33][:batch])
    rows, _ = dustin(pair.target, pair.S, prompts, new=new, eos_token_id=None)
    assert {len(row) for row in rows} == {new}
    assert_rows_equal_plain(pair.target, pair.S, prompts, new=new)


def test_max_length_p03(pair):
    prompts = random_prompts([9, 20])
    rows, _ = dustin(pair.target, pair.S, prompts, max_new_tokens=None, max_length=21, eos_token_id=None)
    assert rows == [plain(pair.target, prompt, new=1, eos_token_id=None) for prompt in prompts]


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_no_drafts_beyond_the_limit_p04(pair, kind):
    """P-04: at most room - 1 drafted per row, and no draft forward at all where every row has room for one token."""
    prompts = random_prompts([9, 20])
    draft = pair.drafts[kind]
    blocks = []  # tokens of every forward of the decode loop
    hook = draft.register_forward_hook(lambda m, a, kw, out: blocks.append(kw["input_ids"].shape), with_kwargs=True)
    _, out = dustin(pair.target, draft, prompts, gamma=7, new=1, eos_token_id=None)
    assert out.stats.draft_calls == 0 and out.stats.drafted == [0, 0]
    assert blocks == ([(2, 1)] if kind == "self" else [])
    blocks.clear()
    _, out = dustin(pair.target, draft, prompts, gamma=7, new=2, eos_token_id=None)
    hook.remove()
    assert out.stats.draft_calls == 1 and all(n <= 1 for n in out.stats.drafted)


def test_drafted_tokens_never_pass_the_limit(pair):
    new = 23
    _, out = dustin(pair.target, pair.M, random_prompts([9, 20, 50]), gamma=7, new=new, eos_token_id=None)
    for committed, drafted in zip(out.stats.committed, out.stats.drafted):
        room, most = new, 0
        for n in committed:
            most += min(7, room - 1)
            room -= n
        assert room == 0 and drafted == most


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["S", "M"])
def test_min_new_tokens_p05(pair, kind, several):
    prompts = random_prompts([12, 30])
    end = [plain(pair.target, prompt, eos_token_id=None)[1] for prompt in prompts]
    out = assert_rows_equal_plain(
        pair.target,
        pair.drafts[kind],
        prompts,
        eos_token_id=end if several else end[0],
        pad_token_id=0,
        min_new_tokens=5,
    )
    assert all(n >= 6 or n == 24 for n in out.stats.new_tokens)


def test_rows_end_by_themselves(pair):
    prompts = random_prompts([12, 30, 7, 50, 21])
    ends = [plain(pair.target, prompt, eos_token_id=None)[i] for i, prompt in enumerate(prompts)]
    out = assert_rows_equal_plain(pair.target, pair.M, prompts, eos_token_id=ends, pad_token_id=0, new=40)
    assert len(set(out.stats.new_tokens)) > 2


def test_lengths_freeze_at_the_end(pair):
    """The cache of a row that has ended holds everything but its last token, as stock's does."""
    prompts = random_prompts([12, 30])
    end = plain(pair.target, prompts[0], eos_token_id=None)[2]
    _, out = dustin(pair.target, pair.M, prompts, eos_token_id=end, pad_token_id=0)
    cache = out.get("cache", out.get("past_key_values"))
    assert cache.lengths.tolist() == [len(p) + n - 1 for p, n in zip(prompts, out.stats.new_tokens)]


@pytest.mark.parametrize("kind", ["S", "M"])
def test_pad_is_end_and_prompts_hold_it_p10(pair, kind):
    """P-10: chat prompts with the end id inside and at their end; only new tokens can end a row."""
    prompts = [[5, 2, 9, 8, 2], [7, 6, 2, 2, 11, 12, 2], [2]]
    inputs = left_pad(prompts, pad_token_id=2)
    from dustin_hf import enable

    with enable(pair.target):
        out = pair.target.generate(
            **inputs,
            assistant_model=pair.drafts[kind],
            cache_implementation="dustin",
            num_assistant_tokens=4,
            eos_token_id=2,
            pad_token_id=2,
            max_new_tokens=30,
            do_sample=False,
        )
    for prompt, row in zip(prompts, out[:, 7:].tolist()):
        expected = plain(pair.target, prompt, new=30, eos_token_id=2, pad_token_id=2)
        assert row == expected + [2] * (len(row) - len(expected))
        assert len(expected) > 1


class StopAfter(StoppingCriteria):
    """Ends a row once its last token is one of `tokens`; remembers every width it was shown."""

    def __init__(self, tokens):
        self.tokens, self.widths = torch.tensor(tokens), []

    def __call__(self, input_ids, scores, **kwargs):
        self.widths.append(tuple(input_ids.shape))
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("kind", ["S", "M"])
def test_user_criteria_see_every_token(pair, kind):
    prompts = random_prompts([12, 30])
    greedy = [plain(pair.target, prompt, eos_token_id=None) for prompt in prompts]
    stop = StopAfter([greedy[0][6], greedy[1][9]])
    rows, _ = dustin(
        pair.target, pair.drafts[kind], prompts, stopping_criteria=StoppingCriteriaList([stop]), eos_token_id=None
    )
    for row, full in zip(rows, greedy):
        end = next(i for i, token in enumerate(full) if token in stop.tokens)
        assert row[: end + 1] == full[: end + 1] and not any(row[end + 1 :])
    assert stop.widths[0] == (2, 31) and {b for b, _ in stop.widths} == {2}


def test_end_ids_and_limits_given_as_criteria(pair):
    """They replace the defaults of the call, as in stock."""
    prompts = random_prompts([12, 30, 5])
    greedy = plain(pair.target, prompts[0], eos_token_id=None)
    width = max(map(len, prompts))
    for criterion, end in (
        (EosTokenCriteria(greedy[5]), None),
        (EosTokenCriteria(greedy[5]), greedy[3]),
        (MaxLengthCriteria(width + 6), None),
        (MaxLengthCriteria(width), None),
        (MaxLengthCriteria(3), None),
        (MaxLengthCriteria(width + 40), greedy[5]),
    ):
        options = {"stopping_criteria": StoppingCriteriaList([criterion]), "eos_token_id": end, "pad_token_id": 0}
        with torch.no_grad():
            expected = pair.target.generate(**left_pad(prompts), max_new_tokens=24, do_sample=False, **options)
        _, out = dustin(pair.target, pair.M, prompts, **options)
        assert torch.equal(out.sequences, expected)
