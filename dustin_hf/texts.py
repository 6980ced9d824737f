"""Texts of folders, files and the Hub, and passages of an exact number of tokens cut from them."""

import gzip
import json
import random
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

BUILT_IN = Path(__file__).parent / "demo_texts"
SUFFIXES = (".txt", ".txt.gz", ".jsonl", ".jsonl.gz")

# Where a sentence ends; quotes and brackets that close with it belong to it.
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*(?=\s)|[。！？][”’」』]*")
# Characters taken for each token that is wanted: more than any tokenizer needs for prose, so that one cut is enough.
_CHARACTERS = 8
# How far a sentence's end may lie from where it is wanted: tokens, or this share of the passage.
_NEAR, _NEAR_SHARE = 32, 0.05


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


def cut_passage(
    texts: Mapping[str, str], tokenizer: "PreTrainedTokenizerBase", room: int, rng: random.Random
) -> tuple[list[int], list[int]]:
    """Exactly `room` tokens of running text, and where in them sentences end.

    The passage ends with a sentence; only its start may be cut anywhere, as an excerpt's may. A text that is too short
    goes on with another. Of slow tokenizers, which have no offsets, only the ends of texts are known.

    Args:
        texts: name -> text, as from `read_texts`.
        tokenizer: of the model.
        room: tokens.
        rng: chooses texts and the place in them.

    Raises:
        ValueError: if all texts together are shorter; it speaks of `lengths`, which the callers take `room` from.
    """
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
        more, more_ends = encode_piece(tokenizer, texts[name][begin : begin + window])
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


def place_between(ends: Sequence[int], wanted: int, room: int) -> int:
    """The place between two sentences that is nearest to `wanted`, or `wanted` itself where none is near.

    Args:
        ends: where sentences of a passage end, as from `cut_passage`.
        wanted: 0 .. `room`, in tokens.
        room: tokens of the passage.
    """
    at = min((0, *ends), key=lambda end: (abs(end - wanted), end))
    return at if abs(at - wanted) <= max(_NEAR, _NEAR_SHARE * room) else wanted


def first_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """What a text starts with: the BOS token, of tokenizers that write one."""
    first: Any = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def encode_piece(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], list[int]]:
    """Ids of a piece of text without special tokens, and the indices of tokens that sentences end before."""
    fast = tokenizer.is_fast
    out: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
    if not fast:
        return out["input_ids"], []
    starts = [start for start, _ in out["offset_mapping"]]
    return out["input_ids"], [bisect_left(starts, match.end()) for match in _SENTENCE_END.finditer(text)]


def rows_of_the_hub(name: str, split: str) -> "Dataset":
    """Part of a data set, downloaded or from the cache.

    Raises:
        FileNotFoundError: if it is in neither place.
        ModuleNotFoundError: without `datasets`.
    """
    from datasets import load_dataset

    try:
        return load_dataset(name, split=split)
    except OSError as error:  # no connection, offline mode, no such set
        raise FileNotFoundError(
            f"{name} cannot be fetched from the Hub ({type(error).__name__}): pass texts of your own (--texts)"
        ) from error
