"""Runs speculative steps until every row has ended. The eager engine: plain PyTorch, any device, the reference."""

from typing import TYPE_CHECKING

import torch

from dustin_hf.model_patches.attention import block_attention
from dustin_hf.processing import needs_prefix
from dustin_hf.stats import StatsRecorder
from dustin_hf.step import DecodeState, StepParts, speculative_step

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
            streamer: receives the new tokens of a single row, step by step.
        """
        limit = parts.ending.limit
        prefixes = needs_prefix(parts.processors)
        columns = state.first.tolist()
        with block_attention(parts.target, parts.proposer.model):
            while any(column < limit for column in columns):
                # nobody needs more drafts than fit before the target's own token
                drafts = min(gamma, limit - min(columns) - 1)
                before = columns
                speculative_step(parts, state, drafts, columns if prefixes else None, recorder)
                first, finished = torch.stack([state.first, state.finished.long()]).tolist()
                if streamer is not None and first[0] > before[0]:
                    streamer.put(state.sequences[0, before[0] : first[0]].cpu())
                columns = [limit if end else column for end, column in zip(finished, first)]
        if streamer is not None:
            streamer.end()
