"""CUDA graphs: a whole step captured once and replayed, or where the host has a say in between, each forward alone."""

from dataclasses import replace
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from dustin_hf.cache import DustinCache, ordinary_tensors
from dustin_hf.drafting import DraftView, ModelProposer, PromptLookupProposer
from dustin_hf.forward import Forward, input_device
from dustin_hf.model_patches.attention import BlockAttention
from dustin_hf.modules import parameters_of
from dustin_hf.pool import Pool
from dustin_hf.processing import described, of_rows
from dustin_hf.stats import Clock
from dustin_hf.step import DecodeState, StepParts, speculative_step

logger = logging.get_logger(__name__)


class StepGraph:
    """One speculative step of a batch, replayed with a single launch.

    It points at the storage of the caches, and at a state of its own, which calls load and store. It is kept with the
    target's storage (`_Shared.graphs`) and holds neither models nor caches.

    Args:
        parts: of the call that captures it.
        state: that call's; all kernels have to be compiled by now.
        gamma: tokens to draft.
        columns: of its sequences, at least those of every call that uses it.
        pool: gives the memory that all graphs of a target share.
    """

    def __init__(self, parts: StepParts, state: DecodeState, gamma: int, columns: int, pool: Pool):
        self.state = _copy(state, columns)
        # what it reads of its state besides the tokens; a first step has none, and leaves some
        self.started_from = dict(self.state.history)
        self.of_rows = of_rows(parts.processors)
        # tensors that the captured kernels read
        proposer = parts.proposer
        self.kept_alive: tuple[Any, ...] = (parts.forward, parts.policy, parts.processors, parts.ending)
        if isinstance(proposer, ModelProposer):
            self.kept_alive += (proposer.forward, proposer.processors)
            if proposer.cache is not parts.cache:
                self.kept_alive += (proposer.cache.layers,)
        self.device = state.sequences.device
        self.clock = Clock(self.device, captured=True)
        with pool.captured(self.device) as self.graph:
            self.report = speculative_step(parts, self.state, gamma, None, self.clock)

    def load(self, state: DecodeState, processors: LogitsProcessorList) -> None:
        """Start from where a call stands, whose processors are described alike."""
        _assign(self.state, state)
        for own, value in zip(self.of_rows, of_rows(processors)):
            own.copy_(value)
        for layer, q in self.started_from.items():
            q.copy_(state.history[layer])
        if self.state.view is not None and state.view is not None:
            self.state.view.slots.copy_(state.view.slots)
            self.state.view.since.copy_(state.view.since)

    def store(self, state: DecodeState) -> None:
        """Tell the call which tokens there are now."""
        _assign(state, self.state)

    def replay(self) -> torch.Tensor:
        """Run the step; returns its report, which the next replay overwrites."""
        with torch.cuda.device(self.device):
            self.graph.replay()
        return self.report


def step_key(parts: StepParts, gamma: int, columns: int) -> tuple:
    """All that a captured step depends on, besides the storage of the target's cache."""
    proposer = parts.proposer
    models: list[Any] = [parts.forward.model]
    forwards: list[Any] = [parts.forward]
    drafting: tuple = (type(proposer).__name__,)
    if isinstance(proposer, ModelProposer):
        models.append(proposer.model)
        forwards.append(proposer.forward)
        shared = proposer.cache._shared
        drafting += (id(shared), shared.generation, proposer.kind, proposer.sinks, proposer.window, proposer.size)
        drafting += (described(proposer.processors), tuple(proposer.heads.items()), proposer.do_sample)
        drafting += (type(proposer.forward).__name__,)
    elif isinstance(proposer, PromptLookupProposer):
        drafting += (proposer.max_ngram, proposer.do_sample)
    eos = parts.ending.eos
    return (
        gamma,
        columns,
        drafting,
        parts.policy.signature,
        type(parts.forward).__name__,
        described(parts.processors),
        parts.accept,
        parts.pad_token_id,
        None if eos is None else tuple(eos.tolist()),
        tuple(p.data_ptr() for p in parameters_of(*models)),
        tuple(pointer for forward in forwards for pointer in getattr(forward, "pointers", ())),
        torch.get_float32_matmul_precision(),
    )


class CapturedForward:
    """A forward as one graph for each shape of block, for steps that cannot be captured whole.

    Args:
        forward: what to capture.
        pool: gives the memory.
    """

    def __init__(self, forward: Forward, pool: Pool):
        self.forward, self.pool = forward, pool
        self._runs: dict[tuple, int] = {}
        self._graphs: dict[tuple, tuple | None] = {}  # None: cannot be captured

    @property
    def model(self) -> Any:
        """The model whose forward this is."""
        return self.forward.model

    def __call__(
        self, cache: DustinCache, ids: torch.Tensor, attention: BlockAttention, logits_to_keep: int = 0
    ) -> torch.Tensor:
        indices = attention.selection.indices
        if attention.selection.choose is not None:  # it looks at tensors of this step
            return self.forward(cache, ids, attention, logits_to_keep)
        key = (tuple(ids.shape), None if indices is None else tuple(indices.shape), logits_to_keep)
        runs = self._runs[key] = self._runs.get(key, 0) + 1
        if runs <= 2:  # compile the kernels, and leave alone what is not a habit: the first block reads everything
            return self.forward(cache, ids, attention, logits_to_keep)
        if key not in self._graphs:
            try:
                self._graphs[key] = self._capture(cache, ids, attention, logits_to_keep)
            except RuntimeError as error:
                logger.warning_once(  # type: ignore[attr-defined]  # transformers adds it
                    f"a forward could not be captured as a CUDA graph and runs op by op: {error}"
                )
                self._graphs[key] = None
        captured = self._graphs[key]
        if captured is None:
            return self.forward(cache, ids, attention, logits_to_keep)
        graph, own_ids, own_attention, logits = captured
        own_ids.copy_(ids)
        own_attention.start.copy_(attention.start)
        if indices is not None:
            own_attention.selection.indices.copy_(indices)
        with torch.cuda.device(own_ids.device):
            graph.replay()
        # the next replay overwrites them; the logits are used up before it
        attention.queries.update({layer: q.clone() for layer, q in own_attention.queries.items()})
        there: torch.Tensor = logits.to(ids.device)
        return there

    def _capture(self, cache: DustinCache, ids: torch.Tensor, attention: BlockAttention, logits_to_keep: int) -> tuple:
        device, selection = input_device(self.model), attention.selection
        indices = None if selection.indices is None else selection.indices.to(device, copy=True)
        start = attention.start.to(device, copy=True)
        own = BlockAttention(start, replace(selection, indices=indices), attention.heads)
        own_ids = ids.to(device, copy=True)
        with self.pool.captured(device) as graph:
            logits = self.forward(cache, own_ids, own, logits_to_keep)
        return graph, own_ids, own, logits


@ordinary_tensors
def _copy(state: DecodeState, columns: int) -> DecodeState:
    sequences = state.sequences.new_zeros(len(state.sequences), columns)
    sequences[:, : state.sequences.shape[1]] = state.sequences
    view = state.view
    return replace(
        state,
        sequences=sequences,
        first=state.first.clone(),
        finished=state.finished.clone(),
        limit=state.limit.clone(),
        history={layer: q.clone() for layer, q in state.history.items()},
        view=None if view is None else DraftView(view.slots.clone(), view.since.clone()),
    )


def _assign(to: DecodeState, state: DecodeState) -> None:
    """Copy tokens in place, as far as both have columns."""
    width = min(to.sequences.shape[1], state.sequences.shape[1])
    to.sequences[:, :width].copy_(state.sequences[:, :width])
    to.first.copy_(state.first)
    to.finished.copy_(state.finished)
    to.limit.copy_(state.limit)
