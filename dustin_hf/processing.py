"""Logits processors over a block of positions, each position seeing exactly the prefix that stock generate shows it."""

import functools

import torch
from transformers.generation import logits_process as stock

# Stateless functions of the scores alone: a whole block can go through them at once.
PREFIX_FREE = (
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.MinPLogitsWarper,
    stock.SuppressTokensLogitsProcessor,
    stock.TemperatureLogitsWarper,
    stock.TopHLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.TypicalLogitsWarper,
)
# Stateless functions of prefix and scores: safe to call for drafts as well, which raises their acceptance.
STATELESS = PREFIX_FREE + (
    stock.ExponentialDecayLengthPenalty,
    stock.ForcedEOSTokenLogitsProcessor,
    stock.MinLengthLogitsProcessor,
    stock.MinNewTokensLengthLogitsProcessor,
    stock.NoBadWordsLogitsProcessor,
    stock.NoRepeatNGramLogitsProcessor,
    stock.RepetitionPenaltyLogitsProcessor,
    stock.SequenceBiasLogitsProcessor,
    stock.SuppressTokensAtBeginLogitsProcessor,
)
# These keep state from one call to the next, in step with a sequence that only grows; drafts get rejected.
REFUSED = (stock.SynthIDTextWatermarkLogitsProcessor, stock.UnbatchedClassifierFreeGuidanceLogitsProcessor)


def for_drafts(processors: stock.LogitsProcessorList) -> stock.LogitsProcessorList:
    """The processors that drafting applies too. Those of the user are left to verification, which is called once."""
    return stock.LogitsProcessorList([p for p in processors if type(p) in STATELESS])


def needs_prefix(processors: stock.LogitsProcessorList) -> bool:
    """Whether any processor looks at the tokens before the position."""
    return any(type(p) not in PREFIX_FREE for p in processors)


def process_block(
    processors: stock.LogitsProcessorList,
    sequences: torch.Tensor,
    columns: list[int] | None,
    limit: int,
    logits: torch.Tensor,
) -> torch.Tensor:
    """Processed scores of every position of a block.

    Position `i` of row `b` sees `sequences[:, : columns[b] + i]`, so rows of different progress need a call for each
    column; every call gets the whole batch, so that processors which know rows by their index find them.

    Args:
        processors: as prepared by `generate`.
        sequences: left-padded tokens with the drafts in place, `[B, >= max(columns) + L - 1]`.
        columns: first free column of each row, at least `limit` for rows that need nothing more; only read where
            `needs_prefix(processors)`.
        limit: column at which rows end; no processor is shown that many tokens, as in stock.
        logits: `[B, L, V]`.

    Returns:
        `[B, L, V]`, float32 as in stock `generate` where there are processors; `logits` is left as it was.
    """
    if not processors:
        return logits.float() if logits.dtype == torch.float64 else logits
    batch, block, vocabulary = logits.shape
    scores = logits.to(torch.float32, copy=True)
    for processor in processors:
        if type(processor) in PREFIX_FREE:
            scores = processor(None, scores.view(-1, vocabulary)).view(batch, block, vocabulary)
            continue
        assert columns is not None
        if type(processor) is stock.PrefixConstrainedLogitsProcessor:
            scores = _constrain(processor, sequences, columns, limit, scores)
            continue
        first = torch.tensor(columns, device=logits.device)
        rows = torch.arange(batch, device=logits.device)
        result = scores.clone()
        for column in sorted({c + i for c in columns for i in range(block) if c + i < limit}):
            at = column - first  # [B], outside 0 .. block - 1 for rows that are elsewhere
            here = (at >= 0) & (at < block)
            position = at.clamp(0, block - 1)
            processed = processor(sequences[:, :column], scores[rows, position])
            result[rows[here], position[here]] = processed[here]
        scores = result
    return scores


def _constrain(
    processor: stock.PrefixConstrainedLogitsProcessor,
    sequences: torch.Tensor,
    columns: list[int],
    limit: int,
    scores: torch.Tensor,
) -> torch.Tensor:
    """Apply a user's `prefix_allowed_tokens_fn`, which must never be asked about a text that its row does not have."""
    result = scores.clone()
    for row, first in enumerate(columns):
        for position in range(min(scores.shape[1], limit - first)):
            prefix = sequences[row : row + 1, : first + position]
            allowed = processor._prefix_allowed_tokens_fn(row // processor._num_beams, prefix[0])
            # stock masks; a processor of one row, whose answer is known, sees only this row's own text
            one_row = stock.PrefixConstrainedLogitsProcessor(functools.partial(_answer, allowed), num_beams=1)
            result[row, position] = one_row(prefix, scores[row : row + 1, position])[0]
    return result


def _answer(allowed: list[int], batch_id: int, text: torch.Tensor) -> list[int]:
    return allowed
