"""RULER's tasks: exact lengths, what is hidden and asked, cells on their own, chat templates, scores."""

import re
import string
from itertools import product
from statistics import mean

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from dustin_hf.eval.longbench import decode_answer
from dustin_hf.eval.ruler import TASKS, ruler_samples, score, score_task, task_of
from dustin_hf.eval.ruler.tasks import ADJECTIVES, NOUNS
from dustin_hf.eval.ruler.words import fresh, held_words
from dustin_hf.texts import read_texts

TEXTS = read_texts()
TAG = re.compile(r" One tag number of the (\w+ \w+) is (\d{7})\.")
ASSIGNMENT = re.compile(r" VAR ([A-Z]{5}) = (\d{5}|[A-Z]{5})\.")
# As Llama 3's it trims; as of models that think its generation prompt opens a thought.
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)


def bytes_tokenizer():
    """One token for each byte; a BOS token in front, and a chat template."""
    vocabulary = {symbol: i for i, symbol in enumerate(["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", chat_template=CHAT)


def learnt_tokenizer():
    """Byte-level pieces as of Qwen; no BOS token."""
    made, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(TEXTS.values(), trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=made)


def metaspace_tokenizer():
    """As of Llama 2: a space is put in front of every piece; with a BOS token."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=list(string.printable), special_tokens=["<s>", "<unk>"]
    )
    made.train_from_iterator(TEXTS.values(), trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", unk_token="<unk>")


class Slow:
    """One token for each character, and no offsets."""

    is_fast = False
    bos_token_id = None
    chat_template = None

    def __call__(self, text, **kwargs):
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, ids):
        return "".join(map(chr, ids))


MAKERS = {"bytes": bytes_tokenizer, "learnt": learnt_tokenizer, "metaspace": metaspace_tokenizer, "slow": Slow}


@pytest.fixture(scope="module")
def tokenizers():
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request, tokenizers):
    return tokenizers[request.param]


@pytest.fixture(scope="module")
def learnt(tokenizers):
    return tokenizers["learnt"]


def said(sample, tokenizer):
    return tokenizer.decode(list(sample.prompt_ids))


@pytest.mark.parametrize("length", [1500, 4096, 12_000])
@pytest.mark.parametrize("task", TASKS)
def test_lengths_are_exact(task, length, tokenizer):
    for sample in ruler_samples(tokenizer, [task], [length], per_cell=2):
        assert len(sample.prompt_ids) + sample.max_new_tokens == length == sample.length
        assert sample.max_new_tokens == TASKS[task].max_new_tokens and sample.task == task
        bos = tokenizer.bos_token_id
        assert bos is None or (sample.prompt_ids[0] == bos and sample.prompt_ids.count(bos) == 1)
        answer = tokenizer(" " + ", ".join(sample.answers) + ".", add_special_tokens=False)["input_ids"]
        assert len(answer) <= sample.max_new_tokens


def test_32k(tokenizers):
    """More than three of the four excerpts of the package, with a token for each byte."""
    for sample in ruler_samples(tokenizers["bytes"], list(TASKS), [32_000]):
        assert len(sample.prompt_ids) + sample.max_new_tokens == 32_000


@pytest.mark.parametrize(
    "task, keys, values", [("niah_single", 1, 1), ("niah_multikey", 4, 1), ("niah_multivalue", 1, 4)]
)
def test_tags_are_in_the_text(task, keys, values, tokenizer):
    """The asked thing's are the answers; those of others, which distract, are other numbers."""
    for sample in ruler_samples(tokenizer, [task], [2500], per_cell=5):
        text, question = said(sample, tokenizer).split("According to the text above, ")
        hidden = TAG.findall(text)
        assert len(hidden) == len({number for _, number in hidden}) == keys * values
        assert len({key for key, _ in hidden}) == keys
        (asked,) = {key for key, _ in hidden if key in question}
        assert question.count(asked) == 2 and text.count(asked) == values
        assert {number for key, number in hidden if key == asked} == set(sample.answers)
        assert len(sample.answers) == values
        for answer in sample.answers:
            assert text.count(answer) == 1 and answer not in question
        plural = "s" if values > 1 else ""
        assert f"the tag number{plural} of the {asked}?\n" in question
        assert question.endswith(f"of the {asked} {'are' if plural else 'is'}")


def test_variables_are_in_the_text(tokenizer):
    """Every assignment is of what an earlier one gives; following them finds the answers, and ten others."""
    orders = set()
    for sample in ruler_samples(tokenizer, ["vt"], [2500], per_cell=5):
        text, question = said(sample, tokenizer).split("According to the assignments above, ")
        held, sources = {}, []
        for name, source in ASSIGNMENT.findall(text):
            assert name not in held
            held[name] = source if source.isdigit() else held[source]
            sources.append(source)
        assert len(held) == 15 == len(set(sources)) and len(set(held.values())) == 3
        value = re.match(r"5 variables hold (\d{5}),", question)[1]
        assert [name for name in held if held[name] == value] == list(sample.answers) and len(sample.answers) == 5
        assert question.endswith(f"the 5 variables that hold {value} are")
        assert text.count(value) == 1
        for answer in sample.answers:
            assert text.count(answer) == (1 if answer == sample.answers[-1] else 2) and answer not in question
        orders.add(tuple(sorted(set(held.values())).index(held[name]) for name in held))
    assert len(orders) == 5  # chains are mixed


def test_facts_lie_between_sentences_anywhere(learnt):
    """From the start of the text to its end, and evenly; the asked one before, between and behind the others."""
    depths, spans, turns, ends = [], [], set(), tuple(text[-20:] for text in TEXTS.values())
    for sample in ruler_samples(learnt, ["niah_single", "niah_multikey"], [4096], per_cell=40):
        text = said(sample, learnt).split("asked about them.\n\n")[1].split("\n\nAccording to")[0]
        found = list(TAG.finditer(text))
        for place in [*(match.start() for match in found), len(text)]:
            before = text[:place]
            assert not before or before.rstrip("\"'”’)]")[-1] in ".!?…" or before.endswith(ends)
        if sample.task == "niah_single":
            depths.append(found[0].start() / (len(text) - len(found[0][0])))
        else:
            spans.append((found[-1].start() - found[0].start()) / len(text))
            turns.add([match[2] for match in found].index(sample.answers[0]))
    assert min(depths) < 0.1 and max(depths) > 0.9 and 0.35 < mean(depths) < 0.65
    assert max(b - a for a, b in zip(sorted(depths), sorted(depths)[1:])) < 0.2
    assert turns == {0, 1, 2, 3} and 0.5 < mean(spans) < 0.7  # of four even draws: 3/5


def test_samples_are_deterministic_and_on_their_own(learnt):
    asked = {"tasks": list(TASKS), "lengths": [1500, 1600], "per_cell": 2}
    made = ruler_samples(learnt, **asked, seed=3)
    assert [(s.task, s.length, s.number) for s in made] == list(product(TASKS, (1500, 1600), (0, 1)))
    assert made == ruler_samples(learnt, **asked, seed=3, texts=dict(reversed(TEXTS.items())))
    for task, length in product(TASKS, (1500, 1600)):
        cell = [s for s in made if (s.task, s.length) == (task, length)]
        assert ruler_samples(learnt, [task], [length], seed=3) == cell[:1]
        assert ruler_samples(learnt, [task], [length], per_cell=3, seed=3)[:2] == cell
    other = ruler_samples(learnt, **asked, seed=4)
    answers = [answer for s in [*made, *other] for answer in s.answers]
    assert len(set(answers)) == len(answers) == 8 * (1 + 1 + 4 + 5)


@pytest.mark.parametrize("task", TASKS)
def test_words_of_the_texts_are_not_used(task, learnt):
    """Whatever would be hidden, once it stands in a text, is drawn again; texts are read as words, not as lines."""
    hidden = ASSIGNMENT if task == "vt" else TAG
    (sample,) = ruler_samples(learnt, [task], [1500])
    made = hidden.findall(said(sample, learnt))
    used = {word for pair in made for word in pair}
    (other,) = ruler_samples(
        learnt, [task], [1500], texts={**TEXTS, "z": "".join(f"({word.title().replace(' ', '- ')})" for word in used)}
    )
    remade = hidden.findall(said(other, learnt))
    assert len(remade) == len(made) and not used & {word for pair in remade for word in pair}


def test_fresh_words_differ():
    drawn = iter(["one", "two", "one two", "one", "three", "Four", "five", "six"])
    assert fresh(lambda: next(drawn), 4, held_words(["Two", "and four."])) == ["one", "one two", "three", "five"]


def test_chat_templates(tokenizers):
    """Around everything; the start of the answer is said by the assistant, who is in no thought and has not ended."""
    tokenizer = tokenizers["bytes"]
    for task in TASKS:
        (plain,) = ruler_samples(tokenizer, [task], [2000])
        (chat,) = ruler_samples(tokenizer, [task], [2000], chat=True)
        assert chat.answers == plain.answers and len(chat.prompt_ids) + chat.max_new_tokens == 2000
        assert chat.prompt_ids.count(tokenizer.bos_token_id) == 1
        text, wrapped = said(plain, tokenizer), said(chat, tokenizer)
        user, prefix = re.fullmatch(r"<s><\|user\|>(.*)</s><\|assistant\|>(.*)", wrapped, re.DOTALL).groups()
        hidden = ASSIGNMENT if task == "vt" else TAG
        assert hidden.findall(user) == hidden.findall(text)
        instruction, question = text.split("\n\n")[0], text.split("\n\n")[-1]
        assert user.startswith(instruction.removeprefix("<s>") + "\n\n")
        assert (user.split("\n\n")[-1], prefix) == tuple(question.split("\n")) and prefix.startswith("According to")


def test_a_right_answer_scores_1(tokenizers):
    tokenizer = tokenizers["bytes"]
    for sample in ruler_samples(tokenizer, list(TASKS), [1500]):
        said = " " + " and ".join(sample.answers).lower() + ".</s> And others."
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert score(decode_answer(ids, tokenizer, [tokenizer.eos_token_id]), sample.answers) == 1
        assert score(decode_answer(ids[:3], tokenizer, []), sample.answers) == 0


ALL_KEYS = {"all.txt": " ".join(f"{a} {n}" for a in ADJECTIVES for n in NOUNS) + "."}


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"tasks": ["niah"]},
            "no RULER task 'niah' here; expected one of niah_single, niah_multikey, niah_multivalue, vt",
        ),
        ({"tasks": []}, "`tasks`, `lengths` and `per_cell` ask for no sample"),
        ({"lengths": []}, "ask for no sample"),
        ({"per_cell": 0}, "ask for no sample"),
        ({"lengths": [1500, 200]}, r"`lengths` must be above \d+ for .* longest answer \(64 tokens\) of vt, got 200"),
        ({"lengths": [100_000]}, r"`lengths` ask for \d+ tokens of running text, but `texts` \(4\) hold \d+ together"),
        ({"tasks": ["niah_single"], "texts": ALL_KEYS}, "`texts` hold nearly every word .* 1 others are needed"),
        ({"chat": True}, "`chat` needs a tokenizer with a chat template"),
    ],
)
def test_errors(change, message, learnt):
    with pytest.raises(ValueError, match=message):
        ruler_samples(**{"tokenizer": learnt, "tasks": ["vt"], "lengths": [1500], **change})


def test_the_shortest_length(tokenizers):
    """One token of text, one more than the length that the error names; facts of `vt` have as many bytes each time."""
    with pytest.raises(ValueError, match="must be above") as raised:
        ruler_samples(tokenizers["bytes"], ["vt"], [10])
    named = int(re.search(r"above (\d+)", str(raised.value))[1])
    with pytest.raises(ValueError, match=f"must be above {named} .* got {named}"):
        ruler_samples(tokenizers["bytes"], ["vt"], [named])
    (sample,) = ruler_samples(tokenizers["bytes"], ["vt"], [named + 1])
    assert len(ASSIGNMENT.findall(said(sample, tokenizers["bytes"]))) == 15


def test_task_of():
    assert task_of("vt").name == "vt"
    with pytest.raises(ValueError, match="no RULER task 'VT'"):
        task_of("VT")


@pytest.mark.parametrize(
    "prediction, answers, expected",
    [
        (" 1234567.", ["1234567"], 1),
        ("", ["1234567"], 0),
        # parts of numbers and words are none of the answers
        ("12345", ["123"], 0),
        ("12345", ["345"], 0),
        ("0123", ["123"], 0),
        ("123rd", ["123"], 0),
        ("x123", ["123"], 0),
        ("123.45 and 0.123", ["123"], 0),
        ("123,456", ["123"], 0),
        ("4,123,456", ["123"], 0),
        ("1,234,567", ["1234567"], 0),
        ("ABCDEF", ["ABCDE"], 0),
        ("ABCDÉ ABCDEÉ", ["ABCDE"], 0),
        # marks around an answer are no part of it
        ("**123**, (456); 789.", ["123", "456", "789"], 1),
        ("1234567,7654321", ["1234567", "7654321"], 1),
        ("12345,678", ["12345", "678"], 1),
        ("1,2345", ["2345"], 1),
        ("VAR_ABCDE=123", ["ABCDE", "123"], 1),
        ("1.\n123.\n2. 456", ["123", "456"], 1),
        # in whatever case, and each answer alike
        ("abcde and Fghij", ["ABCDE", "fGHIJ"], 1),
        ("ABCDE ABCDE", ["ABCDE", "FGHIJ"], 0.5),
        ("ABCDE KLMNO", ["ABCDE", "FGHIJ", "KLMNO", "PQRST"], 0.5),
        ("ABCDE and much else", ["ABCDE"], 1),
    ],
)
def test_score(prediction, answers, expected):
    assert score(prediction, answers) == expected


@pytest.mark.parametrize("answers", ["123", [], ["rusty compass"], ["123", ""], ["123."]])
def test_answers_that_cannot_be_scored(answers):
    with pytest.raises(ValueError, match="`answers` must"):
        score("123", answers)


def test_score_of_a_task():
    assert score_task(["1 2", "3", "none"], [["1", "2"], ["3", "4"], ["5"]]) == 50
    assert score_task(["1", "", ""], [["1"], ["2"], ["3"]]) == 33.33
    for predictions, answers in ([], []), (["1"], [["1"], ["2"]]):
        with pytest.raises(ValueError, match="one for each sample"):
            score_task(predictions, answers)
