"""Logits processors over a block of positions, each position seeing exactly the prefix that stock generate shows it."""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process as stock


class TopKThenTopP(stock.LogitsProcessor):
    """Both stock warpers in turn, without sorting the vocabulary: top-k leaves a few tokens.

    Args:
        top_k: keeps all tokens whose score is at least the k-th; up to 256 of equal score more than k, here.
        top_p: keeps the best of them; which ones of equal scores is no more defined than in stock.
    """

    SHARING = 256

    def __init__(self, top_k: stock.TopKLogitsWarper, top_p: stock.TopPLogitsWarper):
        self.top_k, self.top_p, self.kept = top_k.top_k, top_p.top_p, top_p.min_tokens_to_keep

    def __call__(self, input_ids: torch.Tensor | None, scores: torch.Tensor) -> torch.Tensor:
        k = min(self.top_k, scores.shape[-1])
        values, ids = scores.topk(min(k + self.SHARING, scores.shape[-1]))
        values = values.masked_fill(values < values[:, k - 1 : k], float("-inf")).flip(1)  # the least first, as stock
        removed = values.softmax(-1).cumsum(-1) <= 1 - self.top_p
        removed[:, -self.kept :] = False
        values = values.masked_fill(removed, float("-inf"))
        return torch.full_like(scores, float("-inf")).scatter_(1, ids.flip(1), values)


# Stateless functions of the scores alone: a whole block can go through them at once.
PREFIX_FREE = (
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
    stock.MinPLogitsWarper,
    stock.TemperatureLogitsWarper,
    stock.TopHLogitsWarper,
    TopKThenTopP,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.TypicalLogitsWarper,
)
# Of these, the ones that wait for the device to look at a number (the checks of `torch.distributions`).
WAITING = (stock.EtaLogitsWarper, stock.TopHLogitsWarper)
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
    stock.SuppressTokensLogitsProcessor,
)
# These keep state from one call to the next, in step with a sequence that only grows; drafts get rejected.
REFUSED = (stock.SynthIDTextWatermarkLogitsProcessor, stock.UnbatchedClassifierFreeGuidanceLogitsProcessor)


def prepared(processors: Sequence[Any], batch: int, device: torch.device) -> stock.LogitsProcessorList:
    """The same processors, where top-p comes right after top-k as one, and with tensors for each row where steps run.

    Raises:
        ValueError: if a tensor for each row is of another batch.
    """
    found = stock.LogitsProcessorList()
    for processor in processors:
        for name, value in _of_rows(processor):
            if len(value) != batch:
                raise ValueError(f"`{name}` of {type(processor).__name__} has {len(value)} rows, `input_ids` {batch}")
            processor = copy.copy(processor)  # the caller's stays as it is
            setattr(processor, name, value.to(device, copy=True))
        before: Any = found[-1] if found else None
        pair = type(before) is stock.TopKLogitsWarper and type(processor) is stock.TopPLogitsWarper
        if pair and before.filter_value == processor.filter_value == float("-inf"):
            found[-1] = TopKThenTopP(before, processor)
        else:
            found.append(processor)
    return found


def _of_rows(processor: Any) -> list[tuple[str, torch.Tensor]]:
    """Names and values of what a stock processor holds for each row."""
    value = getattr(processor, "prompt_ignore_length", None)
    if type(processor) is stock.RepetitionPenaltyLogitsProcessor and isinstance(value, torch.Tensor):
        return [("prompt_ignore_length", value)]
    return []


def of_rows(processors: Sequence[Any]) -> list[torch.Tensor]:
    """All that processors hold for each row: captured steps find it in place."""
    return [value for processor in processors for _, value in _of_rows(processor)]


def described(processors: Sequence[Any]) -> tuple:
    """Processors by what they do to rows, whatever they hold for each."""

    def plain(value: Any) -> Any:
        return tuple(value.flatten().tolist()) if isinstance(value, torch.Tensor) else repr(value)

    return tuple(
        (type(p).__name__, *((k, plain(v)) for k, v in sorted(vars(p).items()) if k not in dict(_of_rows(p))))
        for p in processors
    )


def for_drafts(processors: stock.LogitsProcessorList) -> stock.LogitsProcessorList:
    """The processors that drafting applies too. Those of the user are left to verification, which is called once."""
    return stock.LogitsProcessorList([p for p in processors if type(p) in STATELESS])


def needs_prefix(processors: stock.LogitsProcessorList) -> bool:
    """Whether any processor has to be called for each position, with the tokens before it."""
    return any(type(p) not in PREFIX_FREE and _over_blocks(p) is None for p in processors)


def waits(processors: stock.LogitsProcessorList) -> bool:
    """Whether any processor makes the host wait inside a step."""
    return any(isinstance(p, WAITING) for p in processors)


def process_block(
    processors: stock.LogitsProcessorList,
    sequences: torch.Tensor,
    first: torch.Tensor,
    columns: list[int] | None,
    limit: int,
    logits: torch.Tensor,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Processed scores of every position of a block.

    Position `i` of row `b` sees `sequences[:, : columns[b] + i]`, so rows of different progress need a call for each
    column; every call gets the whole batch, so that processors which know rows by their index find them.

    Args:
        processors: as prepared by `generate`.
        sequences: left-padded tokens with the drafts in place, `[B, >= max(columns) + L - 1]`.
        first: first free column of each row, `[B]`.
        columns: the same on the host, at least `limit` for rows that need nothing more; only read where
            `needs_prefix(processors)`.
        limit: column at which rows end; no processor is shown that many tokens, as in stock.
        logits: `[B, L, V]`.
        ends: ids that end a row.

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
        over_block = _over_blocks(processor)
        if over_block is not None:
            scores = over_block(processor, sequences, first, scores)
            continue
        assert columns is not None
        if type(processor) is stock.PrefixConstrainedLogitsProcessor:
            scores = _constrain(processor, sequences, columns, limit, scores, ends)
            continue
        begins = torch.tensor(columns, device=logits.device)
        rows = torch.arange(batch, device=logits.device)
        result = scores.clone()
        for column in sorted({c + i for c in columns for i in range(block) if c + i < limit}):
            at = column - begins  # [B], outside 0 .. block - 1 for rows that are elsewhere
            here = (at >= 0) & (at < block)
            position = at.clamp(0, block - 1)
            processed = processor(sequences[:, :column], scores[rows, position])
            result = result.to(torch.promote_types(result.dtype, processed.dtype))
            result[rows[here], position[here]] = processed[here].to(result.dtype)
        scores = result
    return scores


def _constrain(
    processor: stock.PrefixConstrainedLogitsProcessor,
    sequences: torch.Tensor,
    columns: list[int],
    limit: int,
    scores: torch.Tensor,
    ends: torch.Tensor | None,
) -> torch.Tensor:
    """Apply a user's `prefix_allowed_tokens_fn`, which must never be asked about a text that its row cannot have.

    Behind a draft that its own answer rules out, or that ends the row, positions stay as they are: none is kept.
    """
    result = scores.clone()
    stops = set() if ends is None else set(ends.tolist())
    for row, first in enumerate(columns):
        for position in range(min(scores.shape[1], limit - first)):
            prefix = sequences[row : row + 1, : first + position]
            given = processor._prefix_allowed_tokens_fn(row // processor._num_beams, prefix[0])
            allowed = given.tolist() if isinstance(given, torch.Tensor) else list(given)
            # stock masks; a processor of one row, whose answer is known, sees only this row's own text
            one_row = stock.PrefixConstrainedLogitsProcessor(functools.partial(_answer, allowed), num_beams=1)
            result[row, position] = one_row(prefix, scores[row : row + 1, position])[0]
            following = int(sequences[row, first + position])
            if following not in allowed or following in stops:
                break
    return result


def _answer(allowed: list[int], batch_id: int, text: torch.Tensor) -> list[int]:
    return allowed


def _repetition_penalty(
    processor: Any, sequences: torch.Tensor, first: torch.Tensor, scores: torch.Tensor
) -> torch.Tensor:
    batch, block, vocabulary = scores.shape
    skipped = processor.prompt_ignore_length
    skipped = skipped[:, None] if isinstance(skipped, torch.Tensor) else skipped or 0  # of each row, or of all
    # one place more than tokens, for those that do not count
    seen = scores.new_zeros(batch, vocabulary + 1, dtype=torch.bool)

    def see(tokens: torch.Tensor, columns: torch.Tensor, before: torch.Tensor) -> None:
        counts = (columns >= skipped) & (columns < before)
        seen.scatter_(1, torch.where(counts, tokens, vocabulary).clamp(max=vocabulary), True)

    see(sequences, torch.arange(sequences.shape[1], device=sequences.device), first[:, None])
    found = []
    for i in range(block):
        if i > 0:
            column = (first[:, None] + i - 1).clamp(max=sequences.shape[1] - 1)
            see(sequences.gather(1, column), column, column + 1)
        here = scores[:, i]
        penalised = torch.where(here < 0, here * processor.penalty, here / processor.penalty)
        found.append(torch.where(seen[:, :vocabulary], penalised, here))
    return torch.stack(found, dim=1)


def _are(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Which tokens of the vocabulary are among some ids, `[V]`; ids beyond it are none, as in stock.

    `torch.isin` sorts where there are many ids, for which the host waits.
    """
    vocabulary, ids = scores.shape[-1], ids.reshape(-1).to(scores.device, torch.long)
    found = torch.zeros(vocabulary + 1, dtype=torch.bool, device=scores.device)  # the last place is for all others
    return found.index_fill_(0, torch.where((ids >= 0) & (ids < vocabulary), ids, vocabulary), True)[:-1]


def _no_end_before(length: int, ends: torch.Tensor, first: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Scores in which no end can be chosen in columns before `length`."""
    early = first[:, None] + torch.arange(scores.shape[1], device=first.device) < length
    return scores.masked_fill(early[..., None] & _are(ends, scores), float("-inf"))


def _suppress(processor: Any, sequences: torch.Tensor, first: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(_are(processor.suppress_tokens, scores), float("-inf"))


def _min_length(processor: Any, sequences: torch.Tensor, first: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return _no_end_before(processor.min_length, processor.eos_token_id, first, scores)


def _min_new_tokens(processor: Any, sequences: torch.Tensor, first: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    length = processor.prompt_length_to_skip + processor.min_new_tokens
    return _no_end_before(length, processor.eos_token_id, first, scores)


# Stock processors that see the text, written for a whole block: nothing of it has to come to the host, so that a step
# with them is captured whole. A repetition penalty is in the generation config of every Qwen2.5 chat model.
_OVER_BLOCKS: dict[type, Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    stock.RepetitionPenaltyLogitsProcessor: _repetition_penalty,
    stock.MinLengthLogitsProcessor: _min_length,
    stock.MinNewTokensLengthLogitsProcessor: _min_new_tokens,
    stock.SuppressTokensLogitsProcessor: _suppress,
}


def _over_blocks(processor: Any) -> Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """What stands for a processor over a block; None if it has to be called itself."""
    return _OVER_BLOCKS.get(type(processor))
