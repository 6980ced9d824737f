"""Runs speculative steps until every row has ended: op by op on any device, or replayed as one CUDA graph."""

from typing import TYPE_CHECKING

import torch

from dustin_hf.model_patches.attention import block_attention
from dustin_hf.processing import needs_prefix
from dustin_hf.stats import StatsRecorder
from dustin_hf.step import DecodeState, StepParts, speculative_step
from dustin_hf.streaming import BatchStreamer

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer


def check_backend(backend: str, parts: StepParts) -> None:
    """Raise `ValueError` if a graph is asked for where none can be captured, or would leave something out."""
    models = [model for model in (parts.target, parts.proposer.model) if model is not None]
    devices = {p.device for model in models for p in model.parameters()}
    obstacle = None
    if {device.type for device in devices} != {"cuda"}:
        obstacle = "the models are not on CUDA"
    elif len(devices) > 1:
        obstacle = "the models are on several devices"
    elif any(m._forward_hooks or m._forward_pre_hooks for model in models for m in model.modules()):
        obstacle = "hooks on the models would not run in replays"
    elif needs_prefix(parts.processors) or parts.ending.others:
        obstacle = "processors or stopping criteria look at the text between steps"
    elif parts.scores is not None or parts.logits is not None:
        obstacle = "scores or logits are collected between steps"
    if backend == "graph" and obstacle is not None:
        raise ValueError(f"`backend='graph'` cannot be had here: {obstacle}; use 'eager'")


def run_steps(
    parts: StepParts,
    state: DecodeState,
    gamma: int,
    recorder: StatsRecorder,
    backend: str,
    streamer: "BaseStreamer | None" = None,
) -> None:
    """Step until every row has ended, with one host synchronisation a step.

    Changes `state` and the caches; the models are left as they were.

    Args:
        parts: models, caches and rules of the call.
        state: rows after prefill.
        gamma: most tokens drafted in a step.
        recorder: gets counts and times.
        backend: `"eager"` or `"graph"`.
        streamer: receives new tokens step by step: of a single row, or of all if it is a `BatchStreamer`.
    """
    limit = parts.ending.limit
    prefixes = needs_prefix(parts.processors)
    columns = state.first.tolist()
    graph: StepGraph | None = None
    steps = 0
    with block_attention(*(model for model in (parts.target, parts.proposer.model) if model is not None)):
        while any(column < limit for column in columns):
            # nobody needs more drafts than fit before the target's own token
            drafts = min(gamma, limit - min(columns) - 1)
            before = columns
            # the first steps warm up: one is dense, one compiles the kernels of all the others
            if backend == "graph" and drafts == gamma and steps >= 2:
                graph = graph or StepGraph(parts, state, gamma, recorder)
                graph.replay()
            else:
                speculative_step(parts, state, drafts, columns if prefixes else None, recorder)
            steps += 1
            first, finished = torch.stack([state.first, state.finished.long()]).tolist()
            if streamer is not None:
                _stream(streamer, state.sequences, before, first)
            columns = [limit if end else column for end, column in zip(finished, first)]
    if streamer is not None:
        streamer.end()


class StepGraph:
    """A speculative step of full gamma, captured once and replayed: all it reads and leaves lives in fixed tensors."""

    def __init__(self, parts: StepParts, state: DecodeState, gamma: int, recorder: StatsRecorder):
        self.parts, self.state, self.gamma, self.recorder = parts, state, gamma, recorder
        fixed = self._values()
        self._set(fixed)
        self.graph = torch.cuda.CUDAGraph()
        # capture on the models' device, whichever is current
        with torch.cuda.device(state.sequences.device):
            torch.cuda.synchronize()
            with torch.cuda.graph(self.graph):
                speculative_step(parts, state, gamma, None, recorder)
                for kept, new in zip(self._flat(fixed), self._flat(self._values())):
                    kept.copy_(new)
        self._set(fixed)
        recorder.draft_calls -= gamma  # a capture runs nothing
        self.captured = recorder.take_last()

    def replay(self) -> None:
        """Run the step once more."""
        with torch.cuda.device(self.state.sequences.device), self.recorder.clock.phase("step"):
            self.graph.replay()
        self.recorder.record_replay(self.captured, self.gamma)

    def _values(self) -> tuple:
        """What a step replaces."""
        caches = (self.parts.cache.lengths, self.parts.proposer.cache.lengths)
        return self.state.first, self.state.finished, dict(self.state.history or {}), *caches

    def _set(self, values: tuple) -> None:
        self.state.first, self.state.finished, self.state.history, lengths, draft_lengths = values
        self.parts.proposer.cache.lengths = draft_lengths
        self.parts.cache.lengths = lengths

    @staticmethod
    def _flat(values: tuple) -> list[torch.Tensor]:
        first, finished, history, *lengths = values
        return [first, finished, *history.values(), *lengths]


def _stream(streamer: "BaseStreamer", sequences: torch.Tensor, before: list[int], first: list[int]) -> None:
    """Hand over the tokens between two steps; rows that have ended stand at the limit `before` and have none."""
    new = [sequences[row, begin:end] for row, (begin, end) in enumerate(zip(before, first))]
    if isinstance(streamer, BatchStreamer):
        streamer.put_rows([row.tolist() for row in new])
    elif len(new[0]):
        streamer.put(new[0].cpu())
