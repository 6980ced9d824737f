"""RULER samples: facts hidden in real text, and a question, as prompts of an exact number of tokens."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dustin_hf.eval.ruler.tasks import WORDING, Facts, Task, task_of
from dustin_hf.eval.ruler.words import held_words
from dustin_hf.texts import cut_passage, encode_piece, first_ids, place_between, read_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Stands for the text while the words around it are put in a chat template.
_TEXT = "\0"


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample.

    Args:
        task: name of the task.
        length: tokens of the prompt and the longest answer together.
        number: of the sample among those of its task and length.
        prompt_ids: instruction, text with the facts in it, question, and the start of the answer.
        answers: words or numbers, all of which are asked for.
        max_new_tokens: the longest answer.
    """

    task: str
    length: int
    number: int
    prompt_ids: tuple[int, ...]
    answers: tuple[str, ...]
    max_new_tokens: int


def ruler_samples(
    tokenizer: "PreTrainedTokenizerBase",
    tasks: Sequence[str],
    lengths: Sequence[int],
    texts: Mapping[str, str] | None = None,
    per_cell: int = 1,
    seed: int = 0,
    chat: bool = False,
) -> list[Sample]:
    """Samples for every task and length; the same arguments give the same samples.

    A sample depends on its own task, length and number only, besides texts, tokenizer, seed and `chat`, so asking for
    more cells keeps those there were. Facts lie anywhere in the text, between two sentences if one ends near; no word
    or number that is made up for them occurs in any of the texts. Pieces are tokenised apart and joined as ids, so that
    a prompt and `max_new_tokens` have exactly the asked length.

    The start of the answer ("According to the text, ...") ends the prompt, as in RULER: it keeps a model from talking
    about the question until its tokens are spent. With `chat` it is the unfinished message of the assistant, behind the
    user's with all the rest. It goes through the template as a message to be continued, and not simply behind the
    generation prompt, since that may open a thought which the answer would then be part of.

    Args:
        tokenizer: of the model.
        tasks: names of `TASKS`.
        lengths: tokens of prompt and longest answer together; 4,000 to 32,000 are usual.
        texts: name -> text, as from `read_texts`. Default: the excerpts of the package, about 9,000 tokens.
        per_cell: samples of each task and length, with different facts and passages.
        seed: of all choices.
        chat: wrap the prompts in the tokenizer's chat template.

    Returns:
        By task, then length, then number.

    Raises:
        ValueError: on an unknown task, a length too short for the facts of a task or beyond all texts together, texts
            that hold nearly every word, a tokenizer without the chat template that is asked for, or if nothing is asked
            for.
    """
    if not tasks or not lengths or per_cell < 1:
        raise ValueError(f"`tasks`, `lengths` and `per_cell` ask for no sample: {tasks}, {lengths}, {per_cell}")
    chosen = [task_of(name) for name in tasks]
    if chat and not tokenizer.chat_template:
        raise ValueError("`chat` needs a tokenizer with a chat template, and this one has none: leave `chat` out")
    texts = read_texts() if texts is None else texts
    held = held_words([*texts.values(), *WORDING])
    return [
        _sample(task, length, number, texts, held, tokenizer, seed, chat)
        for task in chosen
        for length in lengths
        for number in range(per_cell)
    ]


def _sample(
    task: Task,
    length: int,
    number: int,
    texts: Mapping[str, str],
    held: str,
    tokenizer: "PreTrainedTokenizerBase",
    seed: int,
    chat: bool,
) -> Sample:
    rng = random.Random(f"{seed} {task.name} {length} {number}")
    facts = task.draw(rng, held)
    head, tail = _around(facts, tokenizer, chat)
    needles = [encode_piece(tokenizer, needle)[0] for needle in facts.needles]
    room = length - len(head) - sum(map(len, needles)) - len(tail) - task.max_new_tokens
    if room < 1:
        raise ValueError(
            f"`lengths` must be above {length - room} for the facts, the question and the longest answer "
            f"({task.max_new_tokens} tokens) of {task.name}, got {length}"
        )
    text, ends = cut_passage(texts, tokenizer, room, rng)
    # in order, and so is what they are moved to: the order of the needles stays
    places = [place_between(ends, wanted, room) for wanted in sorted(rng.choices(range(room + 1), k=len(needles)))]
    prompt = head + text[: places[0]]
    for needle, begin, end in zip(needles, places, [*places[1:], room]):
        prompt += needle + text[begin:end]
    return Sample(task.name, length, number, tuple(prompt + tail), facts.answers, task.max_new_tokens)


def _around(facts: Facts, tokenizer: "PreTrainedTokenizerBase", chat: bool) -> tuple[list[int], list[int]]:
    """What stands before and what behind the text."""
    asked = facts.instruction + _TEXT + facts.question
    if chat:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": facts.prefix}]
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True))
    else:
        prompt = f"{asked}\n{facts.prefix}"
    head, tail = (encode_piece(tokenizer, piece)[0] for piece in prompt.split(_TEXT))
    return head if chat else first_ids(tokenizer) + head, tail  # a chat template writes a BOS token itself
