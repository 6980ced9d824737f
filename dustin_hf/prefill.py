"""Prompts into a DustinCache: unpadded, in chunks, nothing twice; sdpa without masks, or what the user chose."""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dustin_hf._compat import CACHE_ARG
from dustin_hf.cache import DustinCache
from dustin_hf.model_patches.attention import prefill_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Most tokens per forward. A GPU reaches its full speed from a few thousand on, and later chunks of a row cost a little
# more than a first one, so more is better until memory counts. What a forward holds at its widest are three states of
# the MLP: for a 7B model 3 x 18944 x 2 bytes a token, 0.9 GB at 8192 tokens, 3.7 GB for a row of 32k at once, and 60 GB
# for 16 of them. All else (residuals, queries, norms in float32) is about as much again.
DEFAULT_CHUNK = {"cuda": 8192}
DEFAULT_CHUNK_ELSEWHERE = 2048
# Tokens that a forward takes in about the time of one: so many may lie beyond the ends of rows that run together, where
# each alone would wait for its launches. A CPU has no such number.
FREE_TOKENS = {"cuda": 2048}
# Neighbouring rows that start with this many equal tokens share them; fewer are cheaper to compute than to copy.
MIN_SHARED = 64


def held_prefixes(cache: DustinCache, sequences: torch.Tensor, pads: list[int]) -> list[int]:
    """Tokens at the start of each prompt that the cache holds already, the last token of the prompt not counted."""
    # on the device: to fetch the tokens of many long prompts takes longer than to compare them
    device, tokens = sequences.device, cache.tokens.to(sequences.device)
    last, slots = sequences.shape[1] - 1, torch.arange(tokens.shape[1], device=device)
    columns = torch.tensor(pads, device=device)[:, None] + slots
    same = tokens == sequences.gather(1, columns.clamp(max=last))
    same &= (columns < last) & (slots < cache.lengths.to(device)[:, None])
    held: list[int] = same.cumprod(1).sum(1).tolist()
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
        model: target or draft; its decoder is called, or where hooks may change its inputs, the model.
        cache: with a row for each prompt; changed.
        sequences: left-padded prompts, `[B, W]`.
        pads: pads at the start of each row, as Python ints: prompts keep their own shape here, but short ones on CUDA,
            of which several run together (`FREE_TOKENS`).
        held: tokens at the start of each prompt that the cache holds already.
        chunk_size: most tokens per forward, so that activations of long prompts stay small. Default: 8192 on CUDA
            devices, 2048 elsewhere.
    """
    device = sequences.device
    decoder: Any = functools.partial(model, logits_to_keep=1) if model._forward_pre_hooks else model.get_decoder()
    chunk_size = chunk_size or DEFAULT_CHUNK.get(device.type, DEFAULT_CHUNK_ELSEWHERE)
    free = min(chunk_size, FREE_TOKENS.get(device.type, 0))
    begins = torch.tensor(pads, device=device)[:, None]
    last = sequences.shape[1] - 1
    compared = sequences.cpu().numpy()  # once: each comparison on the device would wait for it
    spans = []  # of each prompt, the tokens to compute
    for row, pad in enumerate(pads):
        start, end = held[row], last - pad
        if row and start < end:
            shared = _common(compared[row, pad:last], compared[row - 1, pads[row - 1] : last])
            start = shared if shared - start >= MIN_SHARED else start
        spans.append((start, end))
    with prefill_attention(model):
        for rows, (start, end) in _groups(spans, chunk_size, free):
            for row in range(rows.start, rows.stop):
                if start > held[row]:
                    cache.copy_slots(row - 1, row, held[row], start)
            for begin in range(start, end, chunk_size):
                positions = torch.arange(begin, min(begin + chunk_size, end), device=device)
                # behind the end of a shorter row stands anything: nobody reads what comes of it
                columns = (begins[rows] + positions).clamp(max=last)
                chunk, positions = sequences[rows].gather(1, columns), positions.expand(len(columns), -1)
                with cache.writing_rows(rows, begin):
                    decoder(input_ids=chunk, position_ids=positions, use_cache=True, **{CACHE_ARG: cache})
    cache.lengths = torch.tensor([end for _, end in spans], device=cache.lengths.device)


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common start of two rows of tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n


def _groups(spans: list[tuple[int, int]], chunk_size: int, free: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Neighbouring rows to run together, and the tokens to compute for them, from the same one on.

    Rows with the same span as far as they fit a chunk, others as far as all tokens together are no more than are free.
    """
    first = 0
    while first < len(spans):
        start, end = spans[first]
        stop, alike = first + 1, True
        while stop < len(spans) and spans[stop][0] == start:
            longest, same = max(end, spans[stop][1]), alike and spans[stop][1] == end
            if (stop + 1 - first) * (longest - start) > (chunk_size if same else free):
                break
            stop, end, alike = stop + 1, longest, same
        yield slice(first, stop), (start, end)
        first = stop
