"""Prompts into a DustinCache: without pads, in chunks, under the attention the user chose."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dustin_hf._compat import CACHE_ARG
from dustin_hf.cache import DustinCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_CHUNK = 2048


def prefill(
    model: "PreTrainedModel",
    cache: DustinCache,
    sequences: torch.Tensor,
    pads: list[int],
    chunk_size: int | None = None,
) -> None:
    """Write the keys and values of every prompt but its last token, which is the first input of the decode loop.

    So no row of logits is computed here at all, and both models' caches end at the same lengths.

    Args:
        model: target or draft; its decoder is called without the language-modelling head.
        cache: empty, with a row for each prompt; changed.
        sequences: left-padded prompts, `[B, W]`.
        pads: pads at the start of each row, as Python ints: prompts keep their own shape here.
        chunk_size: most tokens per forward, so that activations of long prompts stay small. Default: 2048.
    """
    decoder = model.get_decoder()
    chunk_size = chunk_size or DEFAULT_CHUNK
    last = sequences.shape[1] - 1
    for rows, pad in _groups(pads, last, chunk_size):
        prompts = sequences[rows, pad:last]
        for begin in range(0, prompts.shape[1], chunk_size):
            chunk = prompts[:, begin : begin + chunk_size]
            positions = torch.arange(begin, begin + chunk.shape[1], device=chunk.device).expand(len(chunk), -1)
            with cache.writing_rows(rows, begin):
                decoder(input_ids=chunk, position_ids=positions, use_cache=True, **{CACHE_ARG: cache})
    cache.lengths = torch.tensor([last - pad for pad in pads], device=cache.lengths.device)


def _groups(pads: list[int], last: int, chunk_size: int) -> Iterator[tuple[slice, int]]:
    """Neighbouring rows of equal length that fit one forward together, and their pads."""
    begin = 0
    while begin < len(pads):
        pad, end = pads[begin], begin + 1
        while end < len(pads) and pads[end] == pad and (end + 1 - begin) * (last - pad) <= chunk_size:
            end += 1
        yield slice(begin, end), pad
        begin = end
