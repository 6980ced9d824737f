"""One speculative step for a whole batch: draft, score, select, verify, accept, commit. Any device, static shapes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.generation.logits_process import LogitsProcessorList

from dustin_hf.acceptance import greedy_accept, sampling_accept
from dustin_hf.cache import DustinCache
from dustin_hf.collecting import ColumnCollector
from dustin_hf.drafting import Draft, Proposer, forward_block
from dustin_hf.model_patches.attention import BlockAttention
from dustin_hf.processing import process_block
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection, SelectionPolicy, Signals
from dustin_hf.stats import StatsRecorder
from dustin_hf.stopping import Ending

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class StepParts:
    """What every step of a call shares; `scores` and `logits` collect per-column outputs where they are asked for."""

    target: "PreTrainedModel"
    cache: DustinCache
    proposer: Proposer
    policy: SelectionPolicy
    processors: LogitsProcessorList
    ending: Ending
    do_sample: bool
    pad_token_id: int
    scores: ColumnCollector | None = None
    logits: ColumnCollector | None = None


@dataclass
class DecodeState:
    """What a step changes, besides the caches.

    Args:
        sequences: left-padded prompts and committed tokens, `[B, limit + gamma + 1]`; from `first[b]` on, pads.
        first: first free column of each row, `[B]`. The token before it is committed but in neither cache.
        finished: rows that have ended, `[B]`, bool.
        history: layer -> `[B, 1, NH, D]`, queries of the last token the target has processed; None before any.
    """

    sequences: torch.Tensor
    first: torch.Tensor
    finished: torch.Tensor
    history: Queries | None = None


def speculative_step(
    parts: StepParts, state: DecodeState, gamma: int, columns: list[int] | None, recorder: StatsRecorder
) -> None:
    """Advance every unfinished row by 1 to `gamma + 1` tokens. Changes `state` and both caches.

    Args:
        parts: models, caches and rules of the call.
        state: where the rows stand.
        gamma: tokens to draft, 0 or more.
        columns: `state.first` as Python ints, the limit for finished rows; where processors need prefixes.
        recorder: gets the step's counts and times.
    """
    sequences, first = state.sequences, state.first
    rows = torch.arange(len(sequences), device=sequences.device)[:, None]
    lengths = parts.cache.lengths
    # A row near its limit counts fewer drafts, whatever its neighbours still have room for.
    room = torch.where(state.finished, 1, parts.ending.limit - first)
    counts = (room - 1).clamp(max=gamma)

    with recorder.clock.phase("draft"):
        if gamma > 0:
            draft = parts.proposer.propose(sequences, first, columns, lengths, gamma)
        else:
            draft = Draft(sequences[:, :0], None, {})
        if draft.counts is not None:
            counts = torch.minimum(counts, draft.counts)

    with recorder.clock.phase("select"):
        selection = Selection()  # the first step has no history: it reads everything
        if state.history is not None:
            looked_ahead = counts if draft.queries else torch.zeros_like(counts)
            selection = parts.policy.select(
                Signals(lengths, parts.cache, state.history, parts.proposer.cache, draft.queries, looked_ahead)
            )

    with recorder.clock.phase("verify"):
        attention = BlockAttention(lengths, selection, parts.policy.target_heads)
        block = torch.cat([sequences[rows, first[:, None] - 1], draft.tokens], dim=1)
        logits = forward_block(parts.target, parts.cache, block, attention)

    with recorder.clock.phase("accept"):
        scores = process_block(parts.processors, sequences, columns, parts.ending.limit, logits)
        if not parts.do_sample:
            tokens, accepted = greedy_accept(scores, draft.tokens)
        else:
            draft_probs = draft.probs if draft.probs is not None else scores[:, :0]
            tokens, accepted = sampling_accept(scores.softmax(-1), draft_probs, draft.tokens)
        kept = torch.where(state.finished, 0, torch.minimum(accepted, counts) + 1)
        index = torch.arange(gamma + 1, device=first.device)
        sequences[rows, first[:, None] + index] = torch.where(index < kept[:, None], tokens, parts.pad_token_id)
        kept, ended = parts.ending(sequences, first, tokens, kept)

        # commit
        sequences[rows, first[:, None] + index] = torch.where(index < kept[:, None], tokens, parts.pad_token_id)
        last = (kept - 1).clamp(min=0)
        state.history = {
            layer: _keep_last(q, last, None if state.history is None else state.history[layer], kept)
            for layer, q in attention.queries.items()
        }
        for collector, block_of in ((parts.scores, scores), (parts.logits, logits)):
            if collector is not None:
                collector.add(first, kept, block_of)
        state.first = first + kept
        state.finished = state.finished | ended
        parts.cache.lengths = lengths + kept
        parts.proposer.commit(lengths, parts.cache.lengths, gamma)

    full = lengths + gamma + 1
    recorder.record(kept, counts, _tokens_read(selection, full, gamma), full, gamma)


def _keep_last(q: torch.Tensor, last: torch.Tensor, previous: torch.Tensor | None, kept: torch.Tensor) -> torch.Tensor:
    """Query `last[b]` of `q [B, L, NH, D]`, as `[B, 1, NH, D]`; a row that kept nothing keeps `previous`."""
    taken = q.gather(1, last.to(q.device)[:, None, None, None].expand(-1, 1, *q.shape[2:]))
    return taken if previous is None else torch.where((kept > 0).to(q.device)[:, None, None, None], taken, previous)


def _tokens_read(selection: Selection, full: torch.Tensor, gamma: int) -> torch.Tensor:
    """Tokens that the verification of each row attended to, `[B]`, mean over layers and heads."""
    if selection.indices is None:
        return full
    per_set = (selection.indices >= 0).sum(-1).float().mean(-1)  # [n_sets, B]
    sets = selection.layer_sets
    read = per_set[0] if sets is None else per_set[list(sets)].mean(0)
    return read + gamma + 1
