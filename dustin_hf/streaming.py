"""Streamers for batches: stock's own take one row."""

import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class BatchStreamer(BaseStreamer):
    """A streamer that receives the new tokens of every row as they are committed.

    Pass a subclass as `generate(streamer=...)`. `put` gets the padded prompts `[B, W]` once, before anything is
    generated; `put_rows` follows each step; `end` comes last. Rejected drafts are never seen.
    """

    def put(self, value: "torch.Tensor") -> None:
        """The padded prompts, `[B, W]`. Does nothing unless overridden."""

    def put_rows(self, rows: list[list[int]]) -> None:
        """New tokens of each row in this step; empty for rows that have ended."""
        raise NotImplementedError

    def end(self) -> None:
        """Every row has ended. Does nothing unless overridden."""


def _ends_a_piece(character: str) -> bool:
    """Whether text up to this character will not change: after spaces, and in scripts that write none between words."""
    return character.isspace() or unicodedata.east_asian_width(character) in "WF"


class BatchTextStreamer(BatchStreamer):
    """Hands each row's text to a function as it grows, whole words, lines or wide characters (Chinese, say) at a time.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): decodes.
        on_text (`Callable[[int, str], None]`): called with the row's index and its new piece of text.
        skip_prompt (`bool`, *optional*): prompts are never passed on; False is refused.
        decode_kwargs: of `tokenizer.decode`, such as `skip_special_tokens=True`.

    The pieces of a row joined are its decoded new tokens.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        on_text: Callable[[int, str], None],
        skip_prompt: bool = True,
        **decode_kwargs: Any,
    ):
        if not skip_prompt:
            raise ValueError("`skip_prompt=False` is not supported: a BatchTextStreamer passes on new text alone")
        self.tokenizer, self.on_text, self.decode_kwargs = tokenizer, on_text, decode_kwargs
        self.tokens: list[list[int]] = []
        self.printed: list[int] = []

    def put(self, value: "torch.Tensor") -> None:
        self.tokens, self.printed = [[] for _ in value], [0] * len(value)

    def put_rows(self, rows: list[list[int]]) -> None:
        for row, new in enumerate(rows):
            if new:
                self.tokens[row] += new
                text = self._text(row)
                # the last word may still change: a character of several tokens, a space that a tokenizer adds
                ended = (i for i in range(len(text), self.printed[row], -1) if _ends_a_piece(text[i - 1]))
                self._emit(row, text, next(ended, 0))

    def end(self) -> None:
        for row in range(len(self.tokens)):
            text = self._text(row)
            self._emit(row, text, len(text))

    def _text(self, row: int) -> str:
        return str(self.tokenizer.decode(self.tokens[row], **self.decode_kwargs))

    def _emit(self, row: int, text: str, end: int) -> None:
        if end > self.printed[row]:
            self.on_text(row, text[self.printed[row] : end])
            self.printed[row] = end
