"""Needle samples: a made-up fact hidden in real text, a question about it, and the answer that repeats the fact."""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dustin_hf.texts import cut_passage, encode_piece, first_ids, place_between

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Every fact is a random combination, so that no model knows it from its training.
CITIES = (
    "Aberdeen Bergen Cadiz Dakar Esfahan Fukuoka Galway Hobart Izmir Jaipur Kazan Lucerne Malmo Nairobi Oaxaca".split()
)
OWNERS = "baker beekeeper clockmaker ferryman gardener glassblower librarian lighthouse-keeper miller tailor".split()
COLOURS = "amber azure copper crimson emerald grey indigo ivory orange purple silver turquoise violet yellow".split()
THINGS = (
    "anchors baskets candles drums feathers kettles ladders lanterns mirrors pebbles ribbons spoons umbrellas".split()
)
PLACES = "attic barn boathouse cellar chapel greenhouse kitchen orchard pantry stable tower workshop".split()
NEEDLE = "The {owner} of {city} keeps exactly {number} {colour} {things} in the old {place}."
QUESTION = "\n\nQuestion: What does the {owner} of {city} keep, how many of them, and where?\nAnswer:"


@dataclass(frozen=True, slots=True)
class NeedleSample:
    """One prompt with a fact in it, and the answer.

    Args:
        prompt_ids: text, fact, text, question.
        answer_ids: the fact again.
        span: tokens `begin .. end - 1` of the prompt are the fact.
        depth: where in the text the fact was wanted, 0 (start) to 1 (end).
        length: tokens of prompt and answer together.
    """

    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    span: tuple[int, int]
    depth: float
    length: int

    @property
    def digest(self) -> str:
        """Hash of what a model sees of it, and of the span."""
        content = json.dumps([self.prompt_ids, self.answer_ids, self.span])
        return hashlib.sha256(content.encode()).hexdigest()[:32]


def needle_samples(
    texts: Mapping[str, str],
    tokenizer: "PreTrainedTokenizerBase",
    lengths: Sequence[int],
    depths: Sequence[float] = (0.1, 0.3, 0.5, 0.7, 0.9),
    per_cell: int = 1,
    seed: int = 0,
    max_positions: int | None = None,
) -> list[NeedleSample]:
    """Samples for every length and depth; the same arguments give the same samples.

    A sample depends on its own length, depth and number only, so asking for more cells keeps those there were. Pieces
    are tokenised apart and joined as ids, so that the span is exact by construction, and so is the length. The text
    ends with a sentence, the fact lies between two, and only the text's start may be cut anywhere, as an excerpt's
    may. (Without offsets, of slow tokenizers, sentences are not found and cuts are made anywhere.)

    Args:
        texts: name -> text, as from `read_texts`. A text that is too short goes on with another.
        tokenizer: of the model.
        lengths: tokens of prompt and answer together.
        depths: 0 (fact at the start) to 1 (at the end).
        per_cell: samples of each length and depth, with different texts and facts.
        seed: of the choice of texts and facts.
        max_positions: the model's `max_position_embeddings`.

    Raises:
        ValueError: on a length beyond the model or beyond all texts together or too short for the question, on a
            depth outside 0 to 1, or if nothing is asked for.
    """
    if not lengths or not depths or per_cell < 1:
        raise ValueError(f"`lengths`, `depths` and `per_cell` ask for no sample: {lengths}, {depths}, {per_cell}")
    if not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"`depths` must be between 0 and 1, got {list(depths)}")
    if max_positions is not None and max(lengths) > max_positions:
        raise ValueError(
            f"`lengths` {list(lengths)} go beyond the model's limit of {max_positions} positions "
            "(max_position_embeddings): ask for shorter ones, or extend the model's context in its config"
        )
    return [
        _sample(texts, tokenizer, length, depth, random.Random(f"{seed} {length} {depth:.6f} {number}"))
        for length in lengths
        for depth in depths
        for number in range(per_cell)
    ]


def fits(texts: Mapping[str, str], tokenizer: "PreTrainedTokenizerBase", length: int) -> bool:
    """Whether texts hold enough for samples of a length."""
    try:
        _sample(texts, tokenizer, length, 0.5, random.Random(0))
    except ValueError:
        return False
    return True


def _sample(
    texts: Mapping[str, str], tokenizer: "PreTrainedTokenizerBase", length: int, depth: float, rng: random.Random
) -> NeedleSample:
    """One sample, drawn from `rng`."""
    fact = {
        "owner": rng.choice(OWNERS),
        "city": rng.choice(CITIES),
        "number": rng.randrange(1000, 10_000),
        "colour": rng.choice(COLOURS),
        "things": rng.choice(THINGS),
        "place": rng.choice(PLACES),
    }
    # the space in front is how both a word in running text and one after "Answer:" are written
    needle = answer = encode_piece(tokenizer, " " + NEEDLE.format(**fact))[0]
    question = encode_piece(tokenizer, QUESTION.format(**fact))[0]
    start = first_ids(tokenizer)
    room = length - len(start) - len(needle) - len(question) - len(answer)
    if room < 1:
        raise ValueError(f"`lengths` must be above {length - room} for fact, question and answer, got {length}")
    text, ends = cut_passage(texts, tokenizer, room, rng)
    at = place_between(ends, round(depth * room), room)
    begin = len(start) + at
    return NeedleSample(
        prompt_ids=(*start, *text[:at], *needle, *text[at:], *question),
        answer_ids=tuple(answer),
        span=(begin, begin + len(needle)),
        depth=depth,
        length=length,
    )
