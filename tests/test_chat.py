"""Continuing from a returned cache, and starts that rows share: the text of a fresh run, nothing computed twice."""

import copy
import pickle

import pytest
import torch
from helpers import dustin, plain

import dustin_hf
from dustin_hf import DustinCache
from dustin_hf._compat import CACHE_ARG
from dustin_hf.testing import left_pad, noisy_copy, random_prompts, tiny_model


class Counting:
    """Counts the tokens that a model's decoder is fed in forwards of more rows and tokens than a step has."""

    def __init__(self, model, step):
        self.tokens = 0
        self.hook = model.model.register_forward_pre_hook(self.count, with_kwargs=True)
        self.step = step

    def count(self, module, args, kwargs):
        if kwargs.get("dustin") is None:
            self.tokens += kwargs["input_ids"].numel()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.hook.remove()


def turn(target, draft, prompts, cache=None, name=CACHE_ARG, **kwargs):
    """One call; returns rows of new tokens without what follows their end, and the cache."""
    kwargs = {"max_new_tokens": 9, "do_sample": False, **kwargs}
    with dustin_hf.enable(target):
        out = target.generate(
            **left_pad(prompts),
            assistant_model=draft,
            **({name: cache} if cache is not None else {"cache_implementation": "dustin"}),
            return_dict_in_generate=True,
            **kwargs,
        )
    width = max(map(len, prompts))
    rows = [row[width : width + n].tolist() for row, n in zip(out.sequences, out.stats.new_tokens)]
    return rows, out[CACHE_ARG]


def next_prompts(prompts, rows, more=(4, 1, 6)):
    additions = random_prompts(list(more), seed=9)
    return [prompt + row + new for prompt, row, new in zip(prompts, rows, additions)]


@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize("inference", [(True, False), (False, True)])
def test_turns_inside_and_outside_of_inference_mode(pair, backend, inference):
    """What one call has allocated, the next may write, whichever of them runs under inference_mode."""
    prompts, options = random_prompts([12, 30, 5]), {"cache_config": {"backend": backend}}
    with torch.inference_mode(inference[0]):
        rows, cache = turn(pair.target, pair.M, prompts, **options)
    prompts = next_prompts(prompts, rows)
    with torch.inference_mode(inference[1]):
        rows, cache = turn(pair.target, pair.M, prompts, cache, **options)
    assert rows == [plain(pair.target, prompt, new=9)[: len(row)] for prompt, row in zip(prompts, rows)]


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("lengths", [[9], [12, 30, 5]])
def test_three_turns_p32(pair, kind, lengths):
    """P-32: each turn equals a fresh run, for one row and for ragged batches; only new tokens are prefilled."""
    draft, cache, prompts = pair.drafts[kind], None, random_prompts(lengths)
    for _ in range(3):
        held = 0 if cache is None else int(cache.lengths.sum())
        with Counting(pair.target, 5) as target_count, Counting(draft, 5) as draft_count:
            rows, cache = turn(pair.target, draft, prompts, cache)
        assert rows == [plain(pair.target, prompt, new=9) for prompt in prompts]
        wanted = sum(map(len, prompts)) - len(prompts) - held
        assert target_count.tokens == wanted
        if kind != "self":
            # the draft lacks a token or two of each row
            assert wanted <= draft_count.tokens <= wanted + 2 * len(prompts)
            assert 0 <= (cache.lengths - cache.draft.lengths).min() <= (cache.lengths - cache.draft.lengths).max() <= 2
        cache.check_integrity()
        prompts = next_prompts(prompts, rows)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_p61(pair, name):
    if name == "cache" and CACHE_ARG != "cache":
        pytest.skip("this transformers knows only the old name")
    prompts = random_prompts([12, 30, 5])
    rows, cache = turn(pair.target, pair.M, prompts)
    prompts = next_prompts(prompts, rows)
    if name == CACHE_ARG:
        rows, again = turn(pair.target, pair.M, prompts, cache, name=name)
    else:
        with pytest.warns(FutureWarning, match="past_key_values"):
            rows, again = turn(pair.target, pair.M, prompts, cache, name=name)
    assert again is cache and rows == [plain(pair.target, prompt, new=9) for prompt in prompts]


def test_cache_and_name_together(pair):
    prompts = random_prompts([12, 30, 5])
    rows, cache = turn(pair.target, pair.M, prompts)
    prompts = next_prompts(prompts, rows)
    again, _ = turn(pair.target, pair.M, prompts, cache, cache_implementation="dustin", cache_config={"budget": 999})
    assert again == [plain(pair.target, prompt, new=9) for prompt in prompts]


@pytest.mark.parametrize("change", ["shorter", "same", "other from the middle", "other from the start"])
def test_prompts_that_do_not_go_on_p32(pair, change):
    """All tokens cached already, or a text that differs: what is shared is kept, the rest computed."""
    prompts = random_prompts([40, 70, 90])
    _, cache = turn(pair.target, pair.M, prompts)
    prompts = {
        "shorter": [p[:-5] for p in prompts],
        "same": prompts,
        "other from the middle": [p[: len(p) // 2] + q for p, q in zip(prompts, random_prompts([20, 9, 60], seed=7))],
        "other from the start": random_prompts([5, 100, 33], seed=8),
    }[change]
    rows, cache = turn(pair.target, pair.M, prompts, cache)
    assert rows == [plain(pair.target, prompt, new=9) for prompt in prompts]
    cache.check_integrity()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_of_a_cache_p34(pair, make):
    """P-34: independent of the original; a pickle fills the draft's cache anew."""
    prompts = random_prompts([12, 30, 5])
    rows, cache = turn(pair.target, pair.M, prompts)
    clone = make(cache)
    assert not {x.data_ptr() for x in clone.layers[0].keys} & {x.data_ptr() for x in cache.layers[0].keys}
    before = cache.layers[0].keys.clone()
    prompts = next_prompts(prompts, rows)
    expected = [plain(pair.target, prompt, new=9) for prompt in prompts]
    assert turn(pair.target, pair.M, prompts, clone)[0] == expected
    assert torch.equal(cache.layers[0].keys, before)
    assert turn(pair.target, pair.M, prompts, cache)[0] == expected


def test_reset_equals_new_p34(pair):
    prompts = random_prompts([12, 30, 5])
    _, cache = turn(pair.target, pair.M, prompts)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.draft.get_seq_length() == 0
    other = random_prompts([20, 3, 40], seed=4)
    with Counting(pair.target, 5) as count:
        rows, _ = turn(pair.target, pair.M, other, cache)
    assert count.tokens == 60 and rows == [plain(pair.target, prompt, new=9) for prompt in other]


def test_another_assistant_gets_a_cache_of_its_own(pair):
    prompts = random_prompts([12, 30, 5])
    rows, cache = turn(pair.target, pair.M, prompts)
    prompts = next_prompts(prompts, rows)
    expected = [plain(pair.target, prompt, new=9) for prompt in prompts]
    for draft in (pair.S, pair.target, noisy_copy(pair.target, 0.1), pair.M):
        rows, cache = turn(pair.target, draft, prompts, cache)
        assert rows == expected


def test_a_draft_cache_that_was_left_out_for_a_turn(pair):
    """M drafts, then the target for itself over another text, then M again: M's cache holds nothing of the first."""
    first, second = random_prompts([60, 80]), random_prompts([60, 80], seed=5)
    _, cache = turn(pair.target, pair.M, first)
    second = [a[:20] + b[20:] for a, b in zip(first, second)]
    _, cache = turn(pair.target, pair.target, second, cache)
    rows, cache = turn(pair.target, pair.M, second, cache)
    fresh_rows, fresh = turn(pair.target, pair.M, second)
    assert rows == fresh_rows
    for ours, theirs in zip(cache.draft.layers, fresh.draft.layers):
        for row, length in enumerate(cache.draft.lengths.tolist()):
            torch.testing.assert_close(ours.keys[row, :, :length], theirs.keys[row, :, :length], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DustinCache(2, 2, 40), "has 2 rows, `input_ids` 3"),
        (lambda: DustinCache(3, 3, 40), "made by another model"),
    ],
)
def test_caches_that_do_not_fit(pair, make, message):
    cache = make()
    with pytest.raises(ValueError, match=message):
        turn(pair.target, pair.M, random_prompts([12, 30, 5]), cache)
    assert cache.lengths.tolist() == [0] * cache.batch_size


def test_cache_of_another_kind(pair):
    from transformers import DynamicCache

    with dustin_hf.enable(pair.target), pytest.raises(ValueError, match="is a DynamicCache"):
        pair.target.generate(
            **left_pad(random_prompts([5])),
            assistant_model=pair.M,
            cache_implementation="dustin",
            **{CACHE_ARG: DynamicCache()},
            max_new_tokens=3,
        )


def test_a_model_that_is_not_enabled(pair):
    _, cache = turn(pair.target, pair.M, random_prompts([5]))
    with dustin_hf.enable(pair.D), pytest.raises(ValueError, match="a DustinCache need the model to be enabled"):
        pair.target.generate(**left_pad(random_prompts([5])), **{CACHE_ARG: cache}, max_new_tokens=3)


def test_a_cache_survives_an_error(pair):
    """After an error in the middle the cache holds what is still true, and serves the next call."""
    prompts = random_prompts([12, 30, 5])
    rows, cache = turn(pair.target, pair.M, prompts)
    prompts = next_prompts(prompts, rows)
    calls = []

    def broken(input_ids, scores):
        calls.append(1)
        if len(calls) == 6:
            raise ZeroDivisionError
        return scores

    with pytest.raises(ZeroDivisionError):
        turn(pair.target, pair.M, prompts, cache, logits_processor=[broken])
    cache.check_integrity()
    assert turn(pair.target, pair.M, prompts, cache)[0] == [plain(pair.target, p, new=9) for p in prompts]


def test_one_document_many_questions(pair):
    """A long start that rows share is prefilled once, by itself."""
    document = random_prompts([200])[0]
    prompts = [document + question for question in random_prompts([5, 12, 1, 12, 7], seed=3)]
    with Counting(pair.target, 5) as target_count, Counting(pair.M, 5) as draft_count:
        rows, cache = turn(pair.target, pair.M, prompts)
    assert rows == [plain(pair.target, prompt, new=9) for prompt in prompts]
    questions = sum(len(p) - 200 - 1 for p in prompts)
    assert target_count.tokens == draft_count.tokens == 200 + questions
    cache.check_integrity()


def test_a_prefilled_document_is_expanded(pair):
    """The same by hand: the document's cache, repeated for as many rows as there are questions."""
    document = random_prompts([100])[0]
    _, cache = turn(pair.target, pair.M, [document], max_new_tokens=1)
    cache.batch_repeat_interleave(4)
    prompts = [document + question for question in random_prompts([5, 12, 1, 7], seed=3)]
    with Counting(pair.target, 5) as count:
        rows, cache = turn(pair.target, pair.M, prompts, cache)
    assert rows == [plain(pair.target, prompt, new=9) for prompt in prompts]
    assert count.tokens == sum(len(p) - 1 - 100 for p in prompts)
    assert cache.draft.batch_size == 4


def test_return_sequences_share_their_prompt(pair):
    torch.manual_seed(0)
    with Counting(pair.target, 5) as count:
        dustin(pair.target, pair.M, random_prompts([150, 90]), do_sample=True, num_return_sequences=3, new=5)
    assert count.tokens == 149 + 89


def test_sparse_turns_keep_working(pair):
    """Below full budget a continued run is no fresh run, but rows stay by themselves and caches whole."""
    prompts = random_prompts([50, 90, 70])
    options = {"cache_config": {"budget": 24}}

    def conversation(prompts):
        rows, cache = turn(pair.target, pair.M, prompts, **options)
        return turn(pair.target, pair.M, next_prompts(prompts, rows, [3] * len(prompts)), cache, **options)[0]

    together = conversation(prompts)
    for row, prompt in zip(together, prompts):
        if prompt is prompts[0]:
            assert conversation([prompt])[0] == row


def test_growing_keeps_what_is_held():
    cache = DustinCache(1, 2, 8)
    k = torch.randn(2, 1, 6, 4)
    with cache.writing_block(torch.zeros(2, dtype=torch.long)):
        cache.update(k, k, 0)
    cache.lengths = torch.tensor([6, 3])
    cache.grow(20)
    cache.grow(10)
    assert cache.capacity == 20 and torch.equal(cache.layers[0].keys[:, :, :6], k)
    cache.check_integrity()


def test_a_model_of_the_same_shape_continues(family):
    """The cache knows no model, only shapes; it is the caller's business, as with every cache of the host."""
    target = tiny_model(family)
    rows, cache = turn(target, target, random_prompts([8]))
    assert turn(target, target, random_prompts([8]), cache)[0] == rows


def spoiled(kind, pair, prompts):
    """A cache for a next turn that has more slots than the turn needs, and no draft cache that could go on."""
    if kind == "fresh":
        return DustinCache(2, len(prompts), 500)
    options = {"max_new_tokens": 60, "eos_token_id": None}
    if kind == "self":
        return turn(pair.target, pair.target, prompts, **options)[1]
    _, cache = turn(pair.target, pair.D if kind == "other draft" else pair.M, prompts, **options)
    if kind == "interrupted":

        class Interrupting(dustin_hf.BatchStreamer):
            def put_rows(self, rows):
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            turn(pair.target, pair.M, prompts, cache, streamer=Interrupting())
    return pickle.loads(pickle.dumps(cache)) if kind == "pickle" else cache


@pytest.mark.parametrize("kind", ["fresh", "self", "other draft", "pickle", "interrupted"])
def test_a_shorter_turn_that_needs_a_draft_cache(pair, kind):
    """Both caches have the same slots, whatever the turn needs."""
    prompts = random_prompts([12, 30, 5])
    cache = spoiled(kind, pair, prompts)
    longer = [prompt + [9] for prompt in prompts]
    expected = [plain(pair.target, prompt, new=9) for prompt in longer]
    assert turn(pair.target, pair.M, longer, cache)[0] == expected


def test_what_a_next_turn_finds_does_not_depend_on_neighbours():
    """A row that has ended keeps feeding its draft while others go on: nothing of that may be seen later."""
    target = tiny_model("qwen2", 0).double()
    draft, ends = noisy_copy(target, 0.05), [5, 9, 33, 48, 77, 101, 120]
    options = {"cache_config": {"budget": 24}, "max_new_tokens": 30, "eos_token_id": ends, "pad_token_id": 0}

    def talk(prompts, more):
        rows, cache = turn(target, draft, prompts, **options)
        again = [prompt + row + new for prompt, row, new in zip(prompts, rows, more)]
        return turn(target, draft, again, cache, **options)[0]

    for seed in range(6):
        prompts, more = random_prompts([60, 90, 70], seed=seed), random_prompts([3] * 3, seed=seed + 100)
        assert talk(prompts, more) == [talk([one], [new])[0] for one, new in zip(prompts, more)]


def test_a_cache_of_another_dtype(pair):
    """Autocast in one turn and not in the next, as with stock's cache."""
    prompts = random_prompts([12, 30, 5])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows, cache = turn(pair.target, pair.M, prompts)
    again = next_prompts(prompts, rows)
    # keys of the first turn are rounded, so that texts may differ; the turn after it starts where they end
    rows, cache = turn(pair.target, pair.M, again, cache)
    assert cache.layers[0].keys.dtype == torch.float32 and all(len(row) == 9 or row[-1] == 2 for row in rows)
