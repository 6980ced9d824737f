"""Runs speculative steps until every row has ended: captured on CUDA where that is possible, else op by op."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

from dustin_hf.acceptance import sampling_accept
from dustin_hf.drafting import ModelProposer
from dustin_hf.forward import CompiledForward, Forward, StockForward, input_device
from dustin_hf.fused import fusion_obstacle
from dustin_hf.graphs import CapturedForward, StepGraph, step_key
from dustin_hf.model_patches.attention import block_attention
from dustin_hf.modules import has_hooks, has_patched_classes, parameters_of
from dustin_hf.pool import Pool, capturing, rounded
from dustin_hf.processing import needs_prefix, waits
from dustin_hf.stats import StatsRecorder
from dustin_hf.step import REPORT, DecodeState, StepParts, speculative_step
from dustin_hf.streaming import BatchStreamer

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

logger = logging.get_logger(__name__)

# Kinds of steps that stay captured for one set of storage; beyond it the oldest goes.
MOST_GRAPHS = 8


@dataclass(frozen=True)
class Backend:
    """What runs the steps of a call.

    Args:
        name: `"graph"`, `"compiled"` or `"eager"`.
        reason: why that one, in words.
        whole: whether a step is one graph; else each forward is.
    """

    name: str
    reason: str
    whole: bool = False


def choose_backend(asked: str, parts: StepParts) -> Backend:
    """The backend that `asked` stands for here.

    Raises:
        ValueError: if `"graph"` is asked for where nothing can be captured.
    """
    if asked in ("eager", "compiled"):
        hooked = asked == "compiled" and any(has_hooks(model) for model in _models(parts))
        return Backend(asked, "asked for; a model with hooks runs op by op" if hooked else "asked for")
    obstacle = _capture_obstacle(parts)
    if obstacle is not None:
        if asked == "graph":
            raise ValueError(f"`backend='graph'` cannot be had here: {obstacle}; use 'auto' or 'eager'")
        return Backend("eager", obstacle)
    between = _between_obstacle(parts)
    if between is None:
        return Backend("graph", "one CUDA graph a step", whole=True)
    return Backend("graph", f"one CUDA graph for each forward: {between}")


def _models(parts: StepParts) -> list[Any]:
    return [model for model in (parts.forward.model, parts.proposer.model) if model is not None]


def _capture_obstacle(parts: StepParts) -> str | None:
    """Why not even a forward can be captured."""
    for model in _models(parts):
        devices = {p.device for p in parameters_of(model)}
        if {device.type for device in devices} != {"cuda"}:
            return "not all weights are on CUDA"
        if len(devices) > 1:
            return "a model is on several devices"
        if has_hooks(model):
            return "hooks on the models would not run in replays"
    if torch.is_autocast_enabled("cuda"):
        return "autocast is on, whose copies of the weights are gone after it"
    return None


def _between_obstacle(parts: StepParts) -> str | None:
    """Why the host has a say inside a step."""
    if len({input_device(model) for model in _models(parts)}) > 1:
        return "the models are on different devices"
    if needs_prefix(parts.processors):
        return "processors look at the text"
    if waits(parts.processors):
        return "processors look at numbers"
    if parts.ending.others:
        return "stopping criteria look at the text"
    if parts.scores is not None or parts.logits is not None:
        return "scores or logits are collected"
    return None


def run_steps(
    parts: StepParts,
    state: DecodeState,
    gamma: int,
    recorder: StatsRecorder,
    backend: Backend,
    pool: Pool,
    streamer: "BaseStreamer | None" = None,
) -> Backend:
    """Step until every row has ended, with one host synchronisation a step.

    Changes `state` and the caches; the models are left as they were.

    Args:
        parts: models, caches and rules of the call.
        state: rows after prefill.
        gamma: most tokens drafted in a step.
        recorder: gets counts and times.
        backend: from `choose_backend`.
        pool: of the target.
        streamer: receives new tokens step by step: of a single row, or of all if it is a `BatchStreamer`.

    Returns:
        What ran in the end: another one if a capture failed.
    """
    limit = parts.ending.limit
    columns = state.first.tolist()
    if backend.name != "eager":
        parts = with_fused_forwards(parts, pool, compiling=backend.name == "compiled")
    steps = CapturedSteps(parts, state, gamma, recorder, pool, backend) if backend.whole else None
    if backend.name == "graph" and steps is None:
        parts = _captured_forwards(parts, pool)
    prefixes = needs_prefix(parts.processors)
    # graphs of one target share memory, so that no two of its calls may replay at a time
    with pool.replaying if backend.name == "graph" else nullcontext(), block_attention(*_models(parts)):
        while any(column < limit for column in columns):
            if steps is not None:
                drafts, figures = gamma, steps.run()
            else:
                # nobody needs more drafts than fit before the target's own token
                drafts = min(gamma, limit - min(columns) - 1)
                figures = _op_by_op(parts, state, drafts, columns if prefixes else None, recorder)
            first, finished, committed, drafted, read, full = figures[: len(REPORT)]
            recorder.record([int(n) for n in committed], [int(n) for n in drafted], read, full, drafts)
            if streamer is not None:
                tokens = zip(*figures[len(REPORT) :])
                _stream(streamer, [[int(token) for token in row[: int(n)]] for row, n in zip(tokens, committed)])
            columns = [limit if end else int(column) for end, column in zip(finished, first)]
    if streamer is not None:
        streamer.end()
    if steps is not None:
        steps.store()
        return steps.backend
    return backend


def _op_by_op(
    parts: StepParts, state: DecodeState, gamma: int, columns: list[int] | None, recorder: StatsRecorder
) -> list[list[float]]:
    """A step that is not replayed; returns its report, once it is there."""
    with _turn(parts, state):
        report = speculative_step(parts, state, gamma, columns, recorder.clock)
    figures: list[list[float]] = report.tolist()  # the synchronisation
    return figures


def _turn(parts: StepParts, state: DecodeState) -> AbstractContextManager[object]:
    """Held while a step that draws random numbers on a GPU is launched, op by op or as a replay."""
    draws = parts.accept is sampling_accept and state.sequences.is_cuda
    return capturing if draws else nullcontext()


class CapturedSteps:
    """The steps of one call: replays of what an earlier call has captured, else two as they are and then replays.

    Args:
        parts: over the forwards to capture.
        state: rows after prefill.
        gamma: tokens to draft.
        recorder: gets the times.
        pool: of the target.
        backend: as chosen; `self.backend` says what it came to.
    """

    def __init__(
        self, parts: StepParts, state: DecodeState, gamma: int, recorder: StatsRecorder, pool: Pool, backend: Backend
    ):
        self.parts, self.state, self.gamma, self.recorder, self.pool = parts, state, gamma, recorder, pool
        self.backend = backend
        self.columns = rounded(state.sequences.shape[1])
        self.key = step_key(parts, gamma, self.columns)
        self.graph: StepGraph | None = None
        self.steps = 0

    def run(self) -> list[list[float]]:
        """The next step; returns its report, once it is there."""
        self.steps += 1
        graph = self._next()
        if graph is None:
            return _op_by_op(self.parts, self.state, self.gamma, None, self.recorder)
        if graph is not self.graph:
            graph.load(self.state if self.graph is None else self.graph.state, self.parts.processors)
            self.graph = graph
        with _turn(self.parts, self.state):
            report = graph.replay()
        figures: list[list[float]] = report.tolist()
        self.recorder.replayed.update(graph.clock.seconds())
        return figures

    def _next(self) -> StepGraph | None:
        """The graph of this step; None where it has to run as it is."""
        if self.steps > 2 and self.graph is not None:
            return self.graph  # the key, which names every parameter, is looked up in two steps only
        captured = self.parts.cache._shared.graphs
        # by the third step all kernels are compiled: the first one reads everything, the others what they choose
        if self.key not in captured and self.steps > 2 and self.backend.whole:
            try:
                while len(captured) >= MOST_GRAPHS:
                    del captured[next(iter(captured))]
                with self.recorder.clock.phase("capture"):
                    captured[self.key] = [
                        StepGraph(self.parts, state, self.gamma, self.columns, self.pool)
                        for state in (replace(self.state, history={}, view=None, started=False), self.state)
                    ]
            except RuntimeError as error:
                logger.warning_once(  # type: ignore[attr-defined]  # transformers adds it
                    f"a step could not be captured as a CUDA graph and runs op by op: {error}"
                )
                self.backend = Backend("compiled", f"capture failed: {error}")
        first_and_later = captured.get(self.key)
        return first_and_later and first_and_later[0 if self.steps == 1 else 1]

    def store(self) -> None:
        """Put what the replays left where the call looks for it."""
        if self.graph is not None:
            self.graph.store(self.state)


def with_fused_forwards(parts: StepParts, pool: Pool, compiling: bool = False) -> StepParts:
    """The same steps over fused forwards; models that have none keep their own, if need be through `torch.compile`."""

    def better(forward: Forward) -> Forward:
        if fusion_obstacle(forward.model) is None:
            return pool.fused(forward.model, parts.cache.capacity)
        if not compiling or not isinstance(forward, StockForward):
            return forward
        # compiled code of one layer would serve the next one, whatever hooks that has or its class got since
        changed = has_hooks(forward.model) or has_patched_classes(forward.model)
        return forward if changed else CompiledForward(forward.model)

    if isinstance(parts.proposer, ModelProposer):
        parts.proposer.forward = better(parts.proposer.forward)
    return replace(parts, forward=better(parts.forward))


def _captured_forwards(parts: StepParts, pool: Pool) -> StepParts:
    proposer = parts.proposer
    if isinstance(proposer, ModelProposer):
        proposer.forward = CapturedForward(proposer.forward, pool)
    return replace(parts, forward=CapturedForward(parts.forward, pool))


def _stream(streamer: "BaseStreamer", rows: list[list[int]]) -> None:
    """Hand over the new tokens of a step; rows that have ended have none."""
    if isinstance(streamer, BatchStreamer):
        streamer.put_rows(rows)
    elif rows[0]:
        streamer.put(torch.tensor(rows[0]))
