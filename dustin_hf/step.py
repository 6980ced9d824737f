"""One speculative step for a whole batch: draft, score, select, verify, accept, commit. Any device, static shapes."""

from dataclasses import dataclass, field

import torch
from transformers.generation.logits_process import LogitsProcessorList

from dustin_hf.acceptance import Accept
from dustin_hf.cache import DustinCache
from dustin_hf.collecting import ColumnCollector
from dustin_hf.drafting import Draft, DraftRequest, DraftView, Proposer
from dustin_hf.forward import Forward
from dustin_hf.model_patches.attention import BlockAttention
from dustin_hf.processing import process_block
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection, SelectionPolicy, Signals
from dustin_hf.stats import Clock
from dustin_hf.stopping import Ending

# Rows of a step's report, `[6 + gamma + 1, B]`; the tokens of the block follow.
REPORT = ("first", "finished", "committed", "drafted", "read", "full")


@dataclass(frozen=True)
class StepParts:
    """What every step of a call shares; `scores` and `logits` collect per-column outputs where they are asked for."""

    forward: Forward
    cache: DustinCache
    proposer: Proposer
    policy: SelectionPolicy
    processors: LogitsProcessorList
    ending: Ending
    accept: Accept
    pad_token_id: int
    scores: ColumnCollector | None = None
    logits: ColumnCollector | None = None


@dataclass
class DecodeState:
    """What a step changes, besides the caches. Tensors are changed in place, so that a captured step finds them.

    Args:
        sequences: left-padded prompts and committed tokens, `[B, limit + gamma + 1]`; from `first[b]` on, pads.
        first: first free column of each row, `[B]`. The token before it is committed but in neither cache.
        finished: rows that have ended, `[B]`, bool.
        limit: column at which rows end, a scalar.
        history: layer -> `[B, 1, NH, D]`, queries of the last token the target has processed; empty before any.
        view: what a sparse draft cache attends to; None before any.
        started: whether a step has run.
    """

    sequences: torch.Tensor
    first: torch.Tensor
    finished: torch.Tensor
    limit: torch.Tensor
    history: Queries = field(default_factory=dict)
    view: DraftView | None = None
    started: bool = False


def speculative_step(
    parts: StepParts, state: DecodeState, gamma: int, columns: list[int] | None, clock: Clock
) -> torch.Tensor:
    """Advance every unfinished row by 1 to `gamma + 1` tokens. Changes `state` and both caches.

    Args:
        parts: models, caches and rules of the call.
        state: where the rows stand.
        gamma: tokens to draft, 0 or more.
        columns: `state.first` as Python ints, the limit for finished rows; where processors need prefixes.
        clock: gets the time of each phase.

    Returns:
        The step's report, `[6 + gamma + 1, B]` float32, rows as in `REPORT` and then the block's tokens: all that the
        host needs to know.
    """
    sequences, first, cache, policy, proposer = state.sequences, state.first, parts.cache, parts.policy, parts.proposer
    rows = torch.arange(len(sequences), device=sequences.device)[:, None]
    lengths = cache.lengths
    # A row near its limit counts fewer drafts, whatever its neighbours still have room for.
    counts = torch.where(state.finished, 0, state.limit - first - 1).clamp(max=gamma)

    with clock.phase("draft"):
        draft = Draft(sequences[:, :0], None, {})
        if gamma > 0:
            draft = proposer.propose(DraftRequest(sequences, first, columns, lengths, gamma, state.view))
        if draft.counts is not None:
            counts = torch.minimum(counts, draft.counts)

    with clock.phase("select"):
        looked_ahead = counts if draft.queries else torch.zeros_like(counts)
        draft_scores = None
        if policy.draft_scorer is not None and draft.queries:
            draft_scores = policy.draft_scorer(draft.queries, proposer.cache, lengths, looked_ahead)
        selection = Selection()  # the first step has no history: it reads everything
        if state.started:
            ones = torch.ones_like(lengths)
            scorer = policy.target_scorer
            target_scores = None if scorer is None else scorer(state.history, cache, lengths, ones)
            selection = policy.select(
                Signals(
                    lengths,
                    cache,
                    state.history,
                    proposer.cache,
                    draft.queries,
                    looked_ahead,
                    counts + 1,
                    target_scores,
                    draft_scores,
                )
            )

    with clock.phase("verify"):
        attention = BlockAttention(lengths, selection, policy.target_heads)
        block = torch.cat([sequences[rows, first[:, None] - 1], draft.tokens], dim=1)
        logits = parts.forward(cache, block, attention)

    with clock.phase("accept"):
        scores = process_block(
            parts.processors, sequences, first, columns, parts.ending.limit, logits, parts.ending.eos
        )
        tokens, accepted = parts.accept(scores, draft.tokens, draft.probs)
        kept = torch.where(state.finished, 0, torch.minimum(accepted, counts) + 1)
        index = torch.arange(gamma + 1, device=first.device)
        sequences[rows, first[:, None] + index] = torch.where(index < kept[:, None], tokens, parts.pad_token_id)
        kept, ended = parts.ending(sequences, first, tokens, kept, state.limit)

        for collector, block_of in ((parts.scores, scores), (parts.logits, logits)):
            if collector is not None:
                collector.add(first, kept, block_of.float())
        full = lengths + gamma + 1
        read = _tokens_read(selection, attention, full, gamma)

        # commit
        sequences[rows, first[:, None] + index] = torch.where(index < kept[:, None], tokens, parts.pad_token_id)
        _keep_history(state.history, attention.queries, kept)
        if draft_scores is not None:
            _keep_view(state, proposer.choose_view(draft_scores, lengths))
        after = lengths + kept
        proposer.commit(lengths, after, gamma)
        cache.lengths = after
        first.add_(kept)
        state.finished.logical_or_(ended)
        state.started = True
        return torch.cat([torch.stack([first, state.finished, kept, counts, read, full]), tokens.T]).float()


def _keep_history(history: Queries, queries: Queries, kept: torch.Tensor) -> None:
    """Take the queries of the last kept token; a row that kept nothing keeps what it had."""
    last = (kept - 1).clamp(min=0)
    for layer, q in queries.items():
        taken = q.gather(1, last.to(q.device)[:, None, None, None].expand(-1, 1, *q.shape[2:]))
        if layer in history:
            history[layer].copy_(torch.where((kept > 0).to(q.device)[:, None, None, None], taken, history[layer]))
        else:
            history[layer] = taken


def _keep_view(state: DecodeState, view: DraftView | None) -> None:
    if state.view is None or view is None:
        state.view = view
    else:
        state.view.slots.copy_(view.slots)
        state.view.since.copy_(view.since)


def _tokens_read(selection: Selection, attention: BlockAttention, full: torch.Tensor, gamma: int) -> torch.Tensor:
    """Tokens that the verification of each row attended to, `[B]`, mean over layers and heads."""
    if attention.read:
        return torch.stack(attention.read).mean(0) + gamma + 1
    if selection.indices is None:
        return full
    per_set = (selection.indices >= 0).sum(-1).float().mean(-1)  # [n_sets, B]
    sets = selection.layer_sets
    read = per_set[0] if sets is None else torch.stack([per_set[i] for i in sets]).mean(0)
    return read + gamma + 1
