"""Runs speculative steps until every row has ended. The eager engine: plain PyTorch, any device, the reference."""

from typing import TYPE_CHECKING

import torch

from dustin_hf.model_patches.attention import block_attention
from dustin_hf.processing import needs_prefix
from dustin_hf.stats import StatsRecorder
from dustin_hf.step import DecodeState, StepParts, speculative_step
from dustin_hf.streaming import BatchStreamer

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


class EagerEngine:
    """Runs each step op by op, with one host synchronisation a step."""

    name = "eager"

    def run(
        self,
        parts: StepParts,
        state: DecodeState,
        gamma: int,
        recorder: StatsRecorder,
        streamer: "BaseStreamer | None" = None,
    ) -> None:
        """Step until every row has ended. Changes `state` and the caches; the models are left as they were.

        Args:
            parts: models, caches and rules of the call.
            state: rows after prefill.
            gamma: most tokens drafted in a step.
            recorder: gets counts and times.
            streamer: receives new tokens step by step: of a single row, or of all if it is a `BatchStreamer`.
        """
        limit = parts.ending.limit
        prefixes = needs_prefix(parts.processors)
        columns = state.first.tolist()
        models = [m for m in (parts.target, parts.proposer.model) if m is not None]
        with block_attention(*models):
            while any(column < limit for column in columns):
                # nobody needs more drafts than fit before the target's own token
                drafts = min(gamma, limit - min(columns) - 1)
                before = columns
                speculative_step(parts, state, drafts, columns if prefixes else None, recorder)
                first, finished = torch.stack([state.first, state.finished.long()]).tolist()
                if streamer is not None:
                    _stream(streamer, state.sequences, before, first)
                columns = [limit if end else column for end, column in zip(finished, first)]
        if streamer is not None:
            streamer.end()


def _stream(streamer: "BaseStreamer", sequences: torch.Tensor, before: list[int], first: list[int]) -> None:
    """Hand over the tokens between two steps; rows that have ended stand at the limit `before` and have none."""
    new = [sequences[row, begin:end] for row, (begin, end) in enumerate(zip(before, first))]
    if isinstance(streamer, BatchStreamer):
        streamer.put_rows([row.tolist() for row in new])
    elif len(new[0]):
        streamer.put(new[0].cpu())
