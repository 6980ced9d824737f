"""LongBench's prompts and answers: golden prompts, the cut from the middle, chat templates, greedy decoding, ends."""

import json
from pathlib import Path

import pytest
from helpers import dustin, plain
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerFast

from dustin_hf.eval.longbench import (
    TASKS,
    Sample,
    decode_answer,
    encode_prompt,
    end_ids,
    fill_template,
    generate_arguments,
    task_of,
)
from dustin_hf.testing import tiny_model

# A short sample for each task, and the official template filled by splitting it at its fields.
GOLDEN = json.loads((Path(__file__).parent / "data" / "longbench" / "golden_prompts.json").read_text())
NO_CHAT = ("trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p")
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
BOS, EOS, NEWLINE = 0, 1, 2 + sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ċ")


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each byte, and a BOS token in front, as Llama's."""
    vocabulary = {symbol: i for i, symbol in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=CHAT)


@pytest.fixture
def plain_tokenizer(tokenizer):
    """The same, of a base model: without a chat template."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="<s>", eos_token="</s>")


def sample_of(task, context=None):
    golden = GOLDEN[task]
    classes = ("City",) if task in ("trec", "lsht") else None
    return Sample(golden["input"], context or golden["context"], ("x",), 9, task, "en", classes, "id-1")


def text_of(ids, tokenizer):
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("task", TASKS)
def test_golden_prompts_p66(task, tokenizer, plain_tokenizer):
    """Byte for byte; chat template where the official code has one and the tokenizer too; one BOS either way."""
    prompt = GOLDEN[task]["prompt"]
    assert fill_template(sample_of(task)).encode() == prompt.encode()
    chat = prompt if task in NO_CHAT else f"<|user|>{prompt}<|assistant|>"
    for used, expected in ((tokenizer, chat), (plain_tokenizer, prompt)):
        ids = encode_prompt(sample_of(task), used, 4000, 8000)
        assert text_of(ids, used) == "<s>" + expected
    assert task_of(task).max_new_tokens == GOLDEN[task]["max_new_tokens"]


def test_newlines_are_newlines_p68(tokenizer):
    """Those of templates are real ones; a backslash and an n in a sample stay two characters."""
    assert set(GOLDEN) == set(TASKS)
    for task in TASKS.values():
        assert "\n" in task.template and "\\n" not in task.template
        text = text_of(encode_prompt(sample_of(task.name), tokenizer, 4000, 8000), tokenizer)
        assert text.count("\\n") == GOLDEN[task.name]["context"].count("\\n")


@pytest.mark.parametrize("max_length", [2, 3, 101, 400])
@pytest.mark.parametrize("task", ["hotpotqa", "dureader", "triviaqa", "lcc"])
def test_cut_from_the_middle(task, max_length, tokenizer):
    """First and last half of the tokens, BOS counted, as text; letters that the cut splits do not come back whole."""
    prompt = GOLDEN[task]["prompt"].replace(GOLDEN[task]["context"], "é渡 " * 200)
    data, half = prompt.encode(), max_length // 2
    expected = data[: half - 1].decode(errors="replace") + data[-half:].decode(errors="replace")
    if task not in NO_CHAT:
        expected = f"<|user|>{expected}<|assistant|>"
    ids = encode_prompt(sample_of(task, "é渡 " * 200), tokenizer, max_length, 8000)
    assert ids == [BOS, *tokenizer(expected, add_special_tokens=False)["input_ids"]]


def test_prompt_that_just_fits_is_whole(tokenizer):
    prompt = GOLDEN["triviaqa"]["prompt"]
    length = len(prompt.encode()) + 1
    whole, cut = (encode_prompt(sample_of("triviaqa"), tokenizer, n, 8000) for n in (length, length - 1))
    assert text_of(whole, tokenizer) == "<s>" + prompt and len(whole) == length
    assert len(cut) == (length - 1) // 2 * 2  # BOS of the first half is left out, then put in front again


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((1, 8000), "`max_length` must be at least 2, a token of each half, got 1"),
        ((969, 1000), "`max_length` 969 leaves no room for the answers of hotpotqa: expected at most 968"),
        # 25 characters of the chat template come on top
        (
            (300, 340),
            "hotpotqa id-1 has 3[0-9]{2} tokens.*308 leave room for its answer: lower `max_length` 300 by at least",
        ),
    ],
)
def test_no_room(arguments, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        encode_prompt(sample_of("hotpotqa"), tokenizer, *arguments)


def test_unknown_task(tokenizer):
    sample = Sample("q", "c", ("x",), 9, "hotpot", "en", None, "id-1")
    with pytest.raises(ValueError, match="no task 'hotpot'; expected one of narrativeqa"):
        encode_prompt(sample, tokenizer, 100, 8000)


@pytest.mark.parametrize("task", TASKS)
def test_decoding_is_greedy_p68(task, tokenizer):
    """Nothing is drawn, whatever the model's own settings; only samsum gets its own stop rule."""
    config = GenerationConfig(do_sample=True, temperature=0.7, top_p=0.8, eos_token_id=[7, EOS])
    found = generate_arguments(TASKS[task], tokenizer, config)
    expected = {"do_sample": False, "num_beams": 1, "max_new_tokens": GOLDEN[task]["max_new_tokens"]}
    if task == "samsum":
        expected |= {"min_new_tokens": 1, "eos_token_id": [7, EOS, NEWLINE]}
    assert found == expected


def test_ends(tokenizer, plain_tokenizer):
    assert end_ids(TASKS["samsum"], tokenizer, GenerationConfig()) == [EOS, NEWLINE]
    assert end_ids(TASKS["trec"], tokenizer, GenerationConfig()) == []
    assert end_ids(TASKS["trec"], tokenizer, GenerationConfig(eos_token_id=7)) == [7]
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    without = PreTrainedTokenizerFast(tokenizer_object=words)
    with pytest.raises(ValueError, match="samsum ends at a newline, for which this tokenizer has no token"):
        end_ids(TASKS["samsum"], without, GenerationConfig())


def test_nothing_after_the_end_p69(tokenizer):
    """Rows of a batch that ended earlier: neither pads nor what stands behind them is part of the answer."""
    letters = tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    pad = letters[0]  # an ordinary token, as where pad_token_id is 0
    rows = [[*letters[:2], EOS, pad, pad, pad], [*letters[:4], NEWLINE, letters[5]], letters, [EOS] * 6, []]
    answers = [decode_answer(row, tokenizer, [EOS, NEWLINE]) for row in rows]
    assert answers == ["ab", "abcd\n", "abcdef", "", ""]
    assert decode_answer(rows[1], tokenizer, [EOS]) == "abcd\nf"


class Leaning(LogitsProcessor):
    """Makes a newline the likeliest token, a letter the next."""

    def __init__(self, letter):
        self.letter = letter

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, NEWLINE] += 2000
        scores[:, self.letter] += 1000
        return scores


def test_samsum_answer_is_a_line(tokenizer):
    """A newline is held back at the start and then ends the answer, in stock and in Dustin calls."""
    model = tiny_model("qwen2", vocab_size=len(tokenizer), eos_token_id=EOS)
    arguments = generate_arguments(TASKS["samsum"], tokenizer, model.generation_config)
    arguments["logits_processor"] = LogitsProcessorList([Leaning(letter=NEWLINE + 1)])
    prompts = [encode_prompt(sample_of(task), tokenizer, 200, 500) for task in ("samsum", "lcc")]
    assert [plain(model, prompt, **arguments) for prompt in prompts] == [[NEWLINE + 1, NEWLINE]] * 2
    assert dustin(model, model, prompts, **arguments)[0] == [[NEWLINE + 1, NEWLINE]] * 2
