"""Prompts into a DustinCache: row by row without pads, in chunks, under the attention the user chose."""

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
        chunk_size: tokens per forward, so that activations of long prompts stay small. Default: 2048.
    """
    decoder = model.get_decoder()
    chunk_size = chunk_size or DEFAULT_CHUNK
    width = sequences.shape[1]
    for row, pad in enumerate(pads):
        prompt = sequences[row : row + 1, pad : width - 1]
        for begin in range(0, prompt.shape[1], chunk_size):
            chunk = prompt[:, begin : begin + chunk_size]
            positions = torch.arange(begin, begin + chunk.shape[1], device=chunk.device)[None]
            with cache.writing_row(row, begin):
                decoder(input_ids=chunk, position_ids=positions, use_cache=True, **{CACHE_ARG: cache})
    cache.lengths = torch.tensor([width - 1 - pad for pad in pads], device=cache.lengths.device)
