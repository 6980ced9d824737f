"""Passages of books: contexts with what the book goes on with, from a folder or PG-19 on the Hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dustin_hf.texts import first_ids, read_texts, rows_of_the_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# PG-19 (arXiv:1911.05507) as parquet files; the original's loading script no longer runs in `datasets`.
DATASET = "emozilla/pg19-test"
# Of the story continuation task (paper section 5.3.2).
INSTRUCTION = "Here is a part of a story. Go on with the story where it ends, in the same style.\n\n"


@dataclass(frozen=True, slots=True)
class Passage:
    """A context and the tokens that follow it in the book.

    Args:
        name: of the book, and where in it the passage starts, in tokens.
        context: token ids.
        following: token ids.
    """

    name: str
    context: list[int]
    following: list[int]


def load_books(source: str | Path | None = None, limit: int | None = None) -> dict[str, str]:
    """Texts by name: of a folder or file as for `read_texts`, or the test split of PG-19 through `datasets`.

    Args:
        source: folder or file. Default: the data set, which has to be downloaded or in the cache.
        limit: most books. Default: all.
    """
    if source is not None:
        return dict(list(read_texts(source).items())[:limit])
    rows = rows_of_the_hub(DATASET, "test" if limit is None else f"test[:{limit}]")
    return {str(row.get("short_book_title", i)): row["text"] for i, row in enumerate(rows)}


def passages(
    books: Mapping[str, str],
    tokenizer: "PreTrainedTokenizerBase",
    context: int,
    following: int,
    count: int,
    story: bool = False,
) -> list[Passage]:
    """Passages from all books in turn, spread over each, none overlapping another.

    Args:
        books: texts by name.
        tokenizer: of the model.
        context: tokens of a context, an instruction included.
        following: tokens that follow.
        count: passages.
        story: put the instruction of the story continuation task in front.

    Raises:
        ValueError: if the books are too short.
    """
    from dustin_hf.eval.efficiency.texts import cut_prompts

    front = tokenizer(INSTRUCTION)["input_ids"] if story else first_ids(tokenizer)
    size = context - len(front) + following
    if size <= following:
        raise ValueError(f"`context` must be above the {len(front)} tokens of the instruction or BOS, got {context}")
    rows = dict(zip(books, tokenizer(list(books.values()), add_special_tokens=False, verbose=False)["input_ids"]))
    if sum(len(row) // size for row in rows.values()) < count:
        raise ValueError(
            f"the books hold {sum(len(row) // size for row in rows.values())} passages of {size:,} tokens, {count} are "
            "asked for: give more or longer books, or lower --context or --samples"
        )
    return [
        Passage(f"{cut.source}@{cut.start}", [*front, *cut.tokens[:-following]], cut.tokens[-following:])
        for cut in cut_prompts(rows, [size] * count)
    ]
