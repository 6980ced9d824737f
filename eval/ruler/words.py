"""What counts as one word, and made-up words that a text does not hold."""

import re
from collections.abc import Callable, Iterable

# A number with commas between groups of three digits, or with a decimal point, is one word, so that no part of it is.
_WORD = re.compile(r"\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)*|\d+(?:\.\d+)+|[^\W_]+")
# Far beyond what chance takes; only texts that hold nearly every word there is use them up.
_TRIES = 1000


def words(text: str) -> list[str]:
    """Words and numbers in lower case: runs of letters and digits, and numbers whole, as in 12,345 and 3.14."""
    return _WORD.findall(text.lower())


def held_words(texts: Iterable[str]) -> str:
    """Words of all texts with a space around each, in which `fresh` looks words up."""
    return "\n".join(f" {' '.join(words(text))} " for text in texts)


def fresh(make: Callable[[], str], count: int, held: str) -> list[str]:
    """Different words, or phrases of words, that do not occur in texts.

    Args:
        make: draws one.
        count: how many.
        held: as from `held_words`.

    Raises:
        ValueError: if hardly any is left; it speaks of `texts`, which the callers take `held` from.
    """
    found: list[str] = []
    for _ in range(_TRIES):
        word = make()
        if word not in found and f" {word.lower()} " not in held:
            found.append(word)
        if len(found) == count:
            return found
    raise ValueError(
        f"`texts` hold nearly every word that could be hidden in them: {count} others are needed, {_TRIES} tries found "
        f"{len(found)}; give other texts"
    )
