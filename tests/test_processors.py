"""Logits processors: every block position sees the prefix and the row index that stock shows it."""

import pytest
import torch
from helpers import assert_rows_equal_plain, dustin
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dustin_hf.processing import TopKThenTopP, described, needs_prefix, of_rows, prepared, process_block
from dustin_hf.testing import left_pad, random_prompts

CPU = torch.device("cpu")
PENALTIES = {
    "repetition": {"repetition_penalty": 1.5},
    "ngram": {"no_repeat_ngram_size": 2},
    "both": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
    "bias": {"sequence_bias": [[[17], 4.0], [[5, 9], 6.0]], "bad_words_ids": [[20], [30, 31]]},
    "suppress": {"suppress_tokens": [5, 6, 7, 10**6, *range(60, 90)], "begin_suppress_tokens": [11, 12]},
    "decay": {"exponential_decay_length_penalty": (4, 1.6), "forced_eos_token_id": 2},
}


@pytest.mark.parametrize("kind", ["S", "M", "self"])
@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
def test_processors_of_the_config_p12(pair, kind, options):
    """P-12: at every position equal to plain generate, whose own loop adds one token at a time."""
    out = assert_rows_equal_plain(pair.target, pair.drafts[kind], random_prompts([12, 30, 5]), **options, new=30)
    assert out.stats.tau > 1


class Recorder(LogitsProcessor):
    """Raises one token by the length of the prefix and the row's own last token; remembers what it saw."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores):
        self.calls.append((input_ids.clone(), scores.shape, scores.dtype))
        scores = scores.clone()
        rows = torch.arange(len(input_ids))
        scores[rows, (input_ids[:, -1] * 7 + input_ids.shape[1] + rows) % scores.shape[1]] += 5.0
        return scores


def stock_batch(target, prompts, processor, new):
    """Stock generate on the same left-padded batch: the oracle for processors that know rows by index."""
    out = target.generate(
        **left_pad(prompts),
        logits_processor=LogitsProcessorList([processor]),
        max_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[:, max(map(len, prompts)) :].tolist()


@pytest.mark.parametrize("kind", ["S", "D", "M"])
def test_user_processor_sees_prefix_and_row(pair, kind):
    prompts = random_prompts([12, 30, 5])
    recorder = Recorder()
    rows, out = dustin(
        pair.target,
        pair.drafts[kind],
        prompts,
        logits_processor=LogitsProcessorList([recorder]),
        eos_token_id=None,
        pad_token_id=0,
    )
    assert rows == stock_batch(pair.target, prompts, Recorder(), 24)
    assert {shape for _, shape, _ in recorder.calls} == {(3, 160)}
    assert {dtype for _, _, dtype in recorder.calls} == {torch.float32}
    # the widths start at the prompt and never reach the limit
    widths = [ids.shape[1] for ids, _, _ in recorder.calls]
    assert min(widths) == 30 and max(widths) == 30 + 24 - 1
    # every prefix of the final text was shown for every row
    final = [[0] * (30 - len(p)) + p + row for p, row in zip(prompts, rows)]
    for row in range(3):
        shown = {tuple(ids[row].tolist()) for ids, _, _ in recorder.calls}
        assert all(tuple(final[row][:width]) in shown for width in range(30, 54))


def test_list_is_left_alone_and_calls_repeat_p13(pair):
    prompts = random_prompts([12, 30])
    records = []
    processors = LogitsProcessorList([Recorder()])
    for _ in range(2):
        processors[0].calls = []
        rows, _ = dustin(pair.target, pair.M, prompts, logits_processor=processors)
        records.append((rows, [ids.tolist() for ids, _, _ in processors[0].calls]))
        assert len(processors) == 1
    assert records[0] == records[1]


def test_explicit_minimum_length_processor_p13(pair):
    prompts = random_prompts([12, 30])
    minimum = MinNewTokensLengthLogitsProcessor(30, 6, 2)
    rows, _ = dustin(pair.target, pair.M, prompts, logits_processor=LogitsProcessorList([minimum]))
    assert_rows_equal_plain(pair.target, pair.M, prompts, min_new_tokens=6)
    assert rows == dustin(pair.target, pair.M, prompts, min_new_tokens=6)[0]


def test_no_processors_costs_nothing():
    logits = torch.randn(2, 3, 8)
    assert process_block(LogitsProcessorList(), torch.zeros(2, 9), torch.tensor([4, 6]), None, 9, logits) is logits


def test_processed_scores_leave_logits_alone():
    logits = torch.randn(2, 3, 8)
    before = logits.clone()
    process_block(
        LogitsProcessorList([Recorder()]), torch.zeros(2, 9, dtype=torch.long), torch.tensor([4, 6]), [4, 6], 9, logits
    )
    assert torch.equal(logits, before)


class Penalty(RepetitionPenaltyLogitsProcessor):
    """The user's own."""


WHOLE = {
    "repetition": RepetitionPenaltyLogitsProcessor(1.7),
    "repetition, prompt left out": RepetitionPenaltyLogitsProcessor(0.6, prompt_ignore_length=9),
    "minimum": MinLengthLogitsProcessor(12, [2, 5, 99]),
    "minimum of new tokens": MinNewTokensLengthLogitsProcessor(8, 4, 2),
}


@pytest.mark.parametrize("processor", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("block", [1, 5])
def test_processors_over_a_block_equal_stock_at_every_position(processor, block):
    """Bit for bit, with pads, tokens that repeat, and rows of different progress."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 20, (4, 24), generator=generator)
    sequences[0, :6] = 0
    first, logits = torch.tensor([8, 11, 15, 19]), torch.randn(4, block, 20, generator=generator)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.7), processor, TopKLogitsWarper(9)])
    assert not needs_prefix(processors)
    found = process_block(processors, sequences, first, None, 30, logits)
    for row in range(4):
        for i in range(block):
            prefix = sequences[row : row + 1, : first[row] + i]
            assert torch.equal(found[row, i], processors(prefix, logits[row : row + 1, i])[0])


def test_other_processors_are_called_themselves():
    own = Penalty(1.5)
    assert needs_prefix(LogitsProcessorList([own])) and needs_prefix(LogitsProcessorList([Recorder()]))


@pytest.mark.parametrize("block", [1, 5])
def test_penalty_that_skips_the_pads_of_each_row(block):
    """As stock makes it for batches with pads; steps that are captured find other rows' in place."""
    generator = torch.Generator().manual_seed(0)
    sequences = torch.randint(0, 20, (3, 24), generator=generator)
    first, logits = torch.tensor([8, 11, 15]), torch.randn(3, block, 20, generator=generator)
    skipped = [0, 6, 9]
    given = for_rows(1.7, skipped)
    (found,) = prepared([given], 3, CPU)
    assert found is not given and given.prompt_ignore_length.tolist() == skipped
    scores = process_block([found], sequences, first, None, 30, logits)
    for row, length in enumerate(skipped):
        one = RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=length)
        for i in range(block):
            prefix = sequences[row : row + 1, : first[row] + i]
            assert torch.equal(scores[row, i], one(prefix, logits[row : row + 1, i])[0])
    others = prepared([for_rows(1.7, [1, 2, 3])], 3, CPU)
    assert described([found]) == described(others) != described(prepared([for_rows(1.6, [1, 2, 3])], 3, CPU))
    assert [x.tolist() for x in of_rows(others)] == [[1, 2, 3]] and of_rows([Recorder()]) == []
    with pytest.raises(ValueError, match="`prompt_ignore_length` of RepetitionPenaltyLogitsProcessor has 3 rows"):
        prepared([given], 4, CPU)


def for_rows(penalty, skipped):
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    processor.prompt_ignore_length = torch.tensor(skipped)  # older versions do not take it
    return processor


class Wider:
    """Returns another dtype, as a bias from NumPy makes it."""

    def __init__(self, dtype):
        self.dtype = dtype

    def __call__(self, input_ids, scores):
        return scores.to(self.dtype) + torch.linspace(0, 3, scores.shape[1], dtype=self.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_processors_that_return_another_dtype(pair, dtype):
    options = {"logits_processor": [Wider(dtype)], "renormalize_logits": True}
    assert_rows_equal_plain(pair.target, pair.M, random_prompts([12, 30, 5]), **options)


def test_nothing_to_suppress(pair):
    assert_rows_equal_plain(pair.target, pair.M, random_prompts([12, 30, 5]), suppress_tokens=[])


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.8, 0.95])
@pytest.mark.parametrize("top_k", [1, 20, 50, 5000])
@pytest.mark.parametrize("kept", [1, 3])
def test_top_p_after_top_k_equals_stock(top_k, top_p, kept):
    """Also where many scores are equal, as bfloat16 makes them, or ruled out."""
    pair = [TopKLogitsWarper(top_k), TopPLogitsWarper(top_p, min_tokens_to_keep=kept)]
    (found,) = prepared(pair, 6, CPU)
    scores = 3 * torch.randn(6, 1000, generator=torch.Generator().manual_seed(top_k)).bfloat16().float()
    scores[1, 10:] = float("-inf")
    scores[2] = scores[2].round()
    scores[3] = float("-inf")
    expected, given = pair[1](None, pair[0](None, scores)), found(None, scores)
    assert ((given == scores) | (given == float("-inf"))).all()
    assert torch.equal(given.sort()[0], expected.sort()[0])  # of equal scores, any
    # scores that more tokens share than there is room for: some of them
    flat = found(None, torch.zeros(1, 1000))
    assert k_of(flat) == k_of(pair[1](None, torch.zeros(1, min(1000, top_k + 256))))


def k_of(scores):
    return int(scores.isfinite().sum())


def test_only_stock_neighbours_become_one():
    k, p, own = TopKLogitsWarper(5), TopPLogitsWarper(0.5), type("Own", (TopKLogitsWarper,), {})(5)
    for given in ([p, k], [k, TemperatureLogitsWarper(0.5), p], [own, p], [TopKLogitsWarper(5, -1e9), p], []):
        assert list(prepared(given, 1, CPU)) == given
    assert [type(x) for x in prepared([k, p, k], 1, CPU)] == [TopKThenTopP, TopKLogitsWarper]
