"""Needle samples: a made-up fact hidden in real text, a question about it, and the answer that repeats the fact."""

import gzip
import hashlib
import json
import random
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BUILT_IN = Path(__file__).parents[1] / "demo_texts"
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")

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

# Where a sentence ends; quotes and brackets that close with it belong to it.
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*(?=\s)|[。！？][”’」』]*")
# Characters taken for each token that is wanted: more than any tokenizer needs for prose, so that one cut is enough.
_CHARACTERS = 8
# How far a needle may lie from its depth so as to lie between two sentences: tokens, or this share of the text.
_NEAR, _NEAR_SHARE = 32, 0.05


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


def read_texts(path: str | Path | None = None, field: str = "text") -> dict[str, str]:
    """Texts of a folder or file, by name: `.txt` whole, `.jsonl` one text a line; both also with `.gz`, UTF-8.

    Args:
        path: folder or file. Default: the four book excerpts of the package, about 9,000 tokens in all.
        field: of each line of a `.jsonl` file.

    Raises:
        ValueError: if there is no such file, or one that cannot be read as text; the message names it.
    """
    path = BUILT_IN if path is None else Path(path)
    files = [path] if path.is_file() else sorted(p for p in path.glob("*") if p.name.endswith(SUFFIXES))
    if not files or not files[0].name.endswith(SUFFIXES):
        raise ValueError(f"`texts` {path} holds no {', '.join(SUFFIXES)} file")
    texts = {}
    for file in files:
        try:
            data = file.read_bytes()
            content = (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8")
            if ".jsonl" not in file.suffixes:
                texts[file.name] = content
                continue
            for number, line in enumerate(content.split("\n"), 1):
                if not line.strip():
                    continue
                text = json.loads(line)[field]
                if not isinstance(text, str):
                    raise TypeError(f"line {number} holds a {type(text).__name__}")
                texts[f"{file.name}:{number}"] = text
        # EOFError and OSError: a damaged .gz; ValueError: no UTF-8 or no JSON; KeyError and TypeError: no such field
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"`texts` {file} cannot be read ({type(error).__name__}: {error}); expected UTF-8 text, "
                f"or a JSON object with the field {field!r} on each line of a .jsonl file"
            ) from error
    return texts


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
    needle = answer = _encode(tokenizer, " " + NEEDLE.format(**fact))[0]
    question = _encode(tokenizer, QUESTION.format(**fact))[0]
    first = tokenizer("a")["input_ids"][:1]
    start = first if first == [tokenizer.bos_token_id] else []
    room = length - len(start) - len(needle) - len(question) - len(answer)
    if room < 1:
        raise ValueError(f"`lengths` must be above {length - room} for fact, question and answer, got {length}")
    text, ends = _haystack(texts, tokenizer, room, rng)
    wanted = round(depth * room)
    at = min((0, *ends), key=lambda end: (abs(end - wanted), end))
    if abs(at - wanted) > max(_NEAR, _NEAR_SHARE * room):
        at = wanted
    begin = len(start) + at
    return NeedleSample(
        prompt_ids=(*start, *text[:at], *needle, *text[at:], *question),
        answer_ids=tuple(answer),
        span=(begin, begin + len(needle)),
        depth=depth,
        length=length,
    )


def _haystack(
    texts: Mapping[str, str], tokenizer: "PreTrainedTokenizerBase", room: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Exactly `room` tokens of running text, and where in them sentences end."""
    names = sorted(texts)
    rng.shuffle(names)
    ids: list[int] = []
    ends: list[int] = []
    for name in names:
        # a sentence more than is needed, so that one ends after enough tokens
        window = _CHARACTERS * (room - len(ids)) + 1000
        begin = rng.randrange(max(1, len(texts[name]) - window + 1))
        if begin:
            begin = max(begin, texts[name].find(" ", begin))  # not amid a word
        more, more_ends = _encode(tokenizer, texts[name][begin : begin + window])
        ends += [len(ids) + end for end in more_ends]
        ids += more
        ends.append(len(ids))
        if len(ids) >= room:
            last = ends[bisect_left(ends, room)]
            return ids[last - room : last], [end - last + room for end in ends if last - room <= end <= last]
    raise ValueError(
        f"`lengths` ask for {room} tokens of running text, but `texts` ({len(texts)}) hold {len(ids)} together: "
        "give longer texts, or ask for shorter lengths"
    )


def _encode(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], list[int]]:
    """Ids of a piece of text without special tokens, and the indices of tokens that sentences end before."""
    fast = tokenizer.is_fast
    out: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    if not fast:
        return out["input_ids"], []
    starts = [start for start, _ in out["offset_mapping"]]
    return out["input_ids"], [bisect_left(starts, match.end()) for match in _SENTENCE_END.finditer(text)]
