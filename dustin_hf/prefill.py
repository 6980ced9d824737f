"""Prompts into a DustinCache: without pads, in chunks, nothing twice, under the attention the user chose."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dustin_hf._compat import CACHE_ARG
from dustin_hf.cache import DustinCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_CHUNK = 2048
# Neighbouring rows that start with this many equal tokens share them; fewer are cheaper to compute than to copy.
MIN_SHARED = 64


def held_prefixes(cache: DustinCache, sequences: torch.Tensor, pads: list[int]) -> list[int]:
    """Tokens at the start of each prompt that the cache holds already, the last token of the prompt not counted."""
    held = []
    for row, pad in enumerate(pads):
        length = int(cache.lengths[row])
        held.append(_common(sequences[row, pad:-1], cache.tokens[row, :length]))
    return held


def prefill(
    model: "PreTrainedModel",
    cache: DustinCache,
    sequences: torch.Tensor,
    pads: list[int],
    held: list[int],
    chunk_size: int | None = None,
) -> None:
    """Write the keys and values of every prompt but its last token, which is the first input of the decode loop.

    So no row of logits is computed here at all, and both models' caches end at the same lengths. A long start that a
    prompt shares with the row before it (one document, many questions; several return sequences) is copied.

    Args:
        model: target or draft; its decoder is called without the language-modelling head.
        cache: with a row for each prompt; changed.
        sequences: left-padded prompts, `[B, W]`.
        pads: pads at the start of each row, as Python ints: prompts keep their own shape here.
        held: tokens at the start of each prompt that the cache holds already.
        chunk_size: most tokens per forward, so that activations of long prompts stay small. Default: 2048.
    """
    decoder = model.get_decoder()
    chunk_size = chunk_size or DEFAULT_CHUNK
    last = sequences.shape[1] - 1
    shared = [0] + [
        _common(sequences[row, pads[row] : last], sequences[row - 1, pads[row - 1] : last])
        for row in range(1, len(pads))
    ]
    spans = []  # of each prompt, the tokens to compute
    for row, pad in enumerate(pads):
        copied = shared[row] if shared[row] - held[row] >= MIN_SHARED else 0
        spans.append((max(held[row], copied), last - pad))
    for rows, (start, end) in _groups(spans, chunk_size):
        for row in range(rows.start, rows.stop):
            if start > held[row]:
                cache.copy_slots(row - 1, row, held[row], start)
        prompts = sequences[rows, last - end : last]
        for begin in range(start, end, chunk_size):
            chunk = prompts[:, begin : min(begin + chunk_size, end)]
            positions = torch.arange(begin, begin + chunk.shape[1], device=chunk.device).expand(len(chunk), -1)
            with cache.writing_rows(rows, begin):
                decoder(input_ids=chunk, position_ids=positions, use_cache=True, **{CACHE_ARG: cache})
    cache.lengths = torch.tensor([end for _, end in spans], device=cache.lengths.device)


def _common(a: torch.Tensor, b: torch.Tensor) -> int:
    """Length of the common start of two rows of tokens."""
    n = min(len(a), len(b))
    different = (a[:n] != b[:n]).nonzero()
    return int(different[0]) if len(different) else n


def _groups(spans: list[tuple[int, int]], chunk_size: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Neighbouring rows with the same span of tokens to compute that fit one forward together."""
    first = 0
    while first < len(spans):
        start, end = spans[first]
        stop = first + 1
        while stop < len(spans) and spans[stop] == spans[first] and (stop + 1 - first) * (end - start) <= chunk_size:
            stop += 1
        yield slice(first, stop), spans[first]
        first = stop
