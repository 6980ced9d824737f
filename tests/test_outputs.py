"""Per-step outputs, stop strings and other criteria, padding as stock pads: compared with stock on the same batch."""

import time

import pytest
import torch
from helpers import dustin, padded, plain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MaxTimeCriteria, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList

import dustin_hf
from dustin_hf.testing import left_pad, random_prompts

PROMPTS = random_prompts([12, 30, 5])
WIDTH = 30


def stock(target, prompts=PROMPTS, **kwargs):
    """Stock generate on the same left-padded batch."""
    kwargs = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **kwargs}
    return target.generate(**left_pad(prompts), **kwargs)


def ends_of(target, *positions):
    """End ids that make the rows end at different columns."""
    return [plain(target, prompt, eos_token_id=None)[i] for prompt, i in zip(PROMPTS, positions)]


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_scores_and_logits_p14_p15(pair, kind):
    """P-14, P-15: one [B, V] float32 entry per new column; raw and processed by the target, live cells as in stock."""
    options = {
        "eos_token_id": ends_of(pair.target, 4, 9, 20),
        "pad_token_id": 0,
        "repetition_penalty": 1.3,
        "output_scores": True,
        "output_logits": True,
    }
    expected = stock(pair.target, **options)
    rows, out = dustin(pair.target, pair.drafts[kind], PROMPTS, **options)
    assert torch.equal(out.sequences, expected.sequences)
    lengths = out.stats.new_tokens
    assert len(set(lengths)) > 1
    for name in ("scores", "logits"):
        ours, theirs = getattr(out, name), getattr(expected, name)
        assert isinstance(ours, tuple) and len(ours) == len(theirs) == max(lengths)
        for column, (a, b) in enumerate(zip(ours, theirs)):
            assert a.shape == b.shape == (3, 160) and a.dtype == b.dtype == torch.float32
            live = [row for row in range(3) if column < lengths[row]]
            torch.testing.assert_close(a[live], b[live], atol=1e-4, rtol=1e-4)
    assert any(not torch.allclose(a, b) for a, b in zip(out.scores, out.logits)), "the penalty bites"
    transitions = pair.target.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    theirs = pair.target.compute_transition_scores(expected.sequences, expected.scores, normalize_logits=True)
    assert transitions.shape == theirs.shape and transitions.isfinite().all()
    for row, length in enumerate(lengths):
        torch.testing.assert_close(transitions[row, :length], theirs[row, :length], atol=1e-4, rtol=1e-4)


def test_outputs_only_where_asked(pair):
    _, out = dustin(pair.target, pair.M, PROMPTS)
    assert out.scores is None and out.logits is None and out.attentions is None


def test_scores_of_sampling_are_what_was_sampled_from(pair):
    torch.manual_seed(0)
    rows, out = dustin(
        pair.target, pair.M, PROMPTS, do_sample=True, top_k=5, temperature=0.8, output_scores=True, new=30
    )
    for row, length in enumerate(out.stats.new_tokens):
        for column in range(length):
            scores = out.scores[column][row]
            assert scores[rows[row][column]] > -float("inf") and (scores > -float("inf")).sum() == 5


class Characters(PreTrainedTokenizerFast):
    """One printable character for each id, as P-02 asks for."""

    def __init__(self):
        alphabet = [chr(33 + i) if i < 94 else chr(161 + i) for i in range(160)]
        tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(alphabet)}, unk_token="!"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        super().__init__(tokenizer_object=tokenizer, unk_token="!", pad_token="!")


@pytest.mark.parametrize("kind", ["S", "M", "self"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_stop_strings_p02(pair, kind, length):
    """P-02: strings that end at every place of a block, and across two blocks; each row by itself."""
    tokenizer = Characters()
    greedy = [plain(pair.target, prompt, eos_token_id=None) for prompt in PROMPTS]
    for at in range(6):
        strings = [
            "".join(tokenizer.convert_ids_to_tokens(row[at + i : at + i + length])) for i, row in enumerate(greedy)
        ]
        options = {"stop_strings": strings, "tokenizer": tokenizer, "eos_token_id": 2, "pad_token_id": 0}
        expected = stock(pair.target, **options).sequences[:, WIDTH:].tolist()
        rows, _ = dustin(pair.target, pair.drafts[kind], PROMPTS, gamma=8, **options)
        assert rows == expected


def test_max_time_ends_every_row(pair):
    began = time.time()
    rows, out = dustin(pair.target, pair.M, PROMPTS, new=400, max_time=0.3, eos_token_id=None, pad_token_id=0)
    assert time.time() - began < 20 and 0 < len(rows[0]) < 400
    expected = [plain(pair.target, prompt, new=400, eos_token_id=None) for prompt in PROMPTS]
    for row, full, n in zip(rows, expected, out.stats.new_tokens):
        assert row[:n] == full[:n] and not any(row[n:])


def test_max_time_that_is_over(pair):
    criteria = StoppingCriteriaList([MaxTimeCriteria(max_time=0.0, initial_timestamp=0.0)])
    rows, out = dustin(pair.target, pair.S, PROMPTS, stopping_criteria=criteria)
    assert out.stats.new_tokens == [1, 1, 1]


class Remember(StoppingCriteria):
    """Never stops; remembers the text it was shown."""

    def __init__(self):
        self.texts = []

    def __call__(self, input_ids, scores, **kwargs):
        self.texts.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_criteria_see_the_text_token_by_token(pair):
    remember = Remember()
    rows, _ = dustin(
        pair.target, pair.M, PROMPTS, stopping_criteria=StoppingCriteriaList([remember]), eos_token_id=None
    )
    final = padded([[0] * (WIDTH - len(p)) + p + row for p, row in zip(PROMPTS, rows)], WIDTH + 24)
    for row in range(3):
        shown = {tuple(text[row]) for text in remember.texts}
        for width in range(WIDTH + 1, WIDTH + 25):
            assert tuple(final[row][:width]) in shown


def test_criteria_without_a_pad_are_refused(pair):
    saved = pair.target.generation_config.pad_token_id, pair.target.generation_config.eos_token_id
    pair.target.generation_config.pad_token_id = pair.target.generation_config.eos_token_id = None
    try:
        with dustin_hf.enable(pair.target), pytest.raises(ValueError, match="`pad_token_id`"):
            pair.target.generate(
                **left_pad(PROMPTS),
                assistant_model=pair.M,
                cache_implementation="dustin",
                stopping_criteria=StoppingCriteriaList([Remember()]),
                max_new_tokens=4,
            )
    finally:
        pair.target.generation_config.pad_token_id, pair.target.generation_config.eos_token_id = saved


@pytest.mark.parametrize("positions", [(0, 0, 0), (0, 5, 11), (3, 3, 3), (23, 1, 8)])
def test_sequences_are_padded_like_stock(pair, positions):
    options = {"eos_token_id": ends_of(pair.target, *positions), "pad_token_id": 0}
    expected = stock(pair.target, **options).sequences
    _, out = dustin(pair.target, pair.M, PROMPTS, **options)
    assert torch.equal(out.sequences, expected)


def test_limit_of_the_model_itself(pairs, family):
    """Without any limit given stock makes 20 new tokens."""
    pair = pairs(family)
    with dustin_hf.enable(pair.target), pytest.warns(UserWarning, match="default `max_length`"):
        out = pair.target.generate(
            **left_pad(PROMPTS), assistant_model=pair.M, cache_implementation="dustin", do_sample=False
        )
    expected = [plain(pair.target, prompt, new=20) for prompt in PROMPTS]
    assert out[:, WIDTH:].tolist() == padded(expected, max(map(len, expected)))


def test_num_return_sequences_p18(pair):
    """P-18: six rows in stock order, siblings on their own, a cache of six rows."""
    torch.manual_seed(0)
    rows, out = dustin(pair.target, pair.M, PROMPTS[:2], do_sample=True, num_return_sequences=3, new=10)
    assert out.get("cache", out.get("past_key_values")).batch_size == 6
    width = max(map(len, PROMPTS[:2]))
    for i, row in enumerate(out.sequences[:, :width].tolist()):
        prompt = PROMPTS[i // 3]
        assert row == [0] * (width - len(prompt)) + prompt
    assert len({tuple(row) for row in rows[:3]}) > 1 and len({tuple(row) for row in rows[3:]}) > 1
