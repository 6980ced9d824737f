"""Proposers: what drafts a block for every row, and keeps the queries that look ahead."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.generation.logits_process import LogitsProcessorList

from dustin_hf.cache import DustinCache
from dustin_hf.forward import Forward
from dustin_hf.kernels.topk_select import topk_select
from dustin_hf.model_patches.attention import BlockAttention
from dustin_hf.processing import process_block
from dustin_hf.profile import Heads
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def streaming_slots(lengths: torch.Tensor, sinks: int, size: int) -> torch.Tensor:
    """The first `sinks` and the most recent `size - sinks` slots of each row, `[1, B, 1, size]` int32 (MagicDec)."""
    places = torch.arange(size, device=lengths.device)
    recent = lengths[:, None] - size + places
    slots = torch.where(places < sinks, places, recent)
    # a recent slot that is a sink, or lies before the row, is unused: the row is shorter than `size`
    unused = torch.where(places < sinks, places >= lengths[:, None], recent < sinks)
    return slots.masked_fill(unused, -1).int()[None, :, None]


def recent_slots(start: torch.Tensor, since: torch.Tensor, size: int) -> torch.Tensor:
    """The slots `since[b] .. start[b] - 1` of each row, at most `size`, `[B, size]` int32; -1 is unused."""
    slots = start[:, None] - size + torch.arange(size, device=start.device)
    return slots.masked_fill(slots < since[:, None], -1).int()


@dataclass
class DraftView:
    """What a sparse draft cache attends to, besides the tokens that came after it was chosen.

    Args:
        slots: the draft's own choice, `[B, k]` int32, -1 for unused.
        since: tokens of each row when it was chosen, `[B]`.
    """

    slots: torch.Tensor
    since: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Where the rows stand when drafts are wanted.

    Args:
        sequences: left-padded tokens, `[B, W + gamma]` at least; drafts are written from `first[b]` on.
        first: first free column of each row, `[B]`.
        columns: the same as Python ints, where processors need them.
        lengths: tokens of each row in the target's cache, `[B]`: all but the last one.
        gamma: tokens to draft, at least 1.
        view: what a sparse draft cache attends to; None for the whole row.
    """

    sequences: torch.Tensor
    first: torch.Tensor
    columns: list[int] | None
    lengths: torch.Tensor
    gamma: int
    view: DraftView | None = None


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposal.

    Args:
        tokens: `[B, gamma]`.
        probs: what they were drawn from, `[B, gamma, V]` over the target's vocabulary; None when greedy.
        queries: layer -> `[B, gamma, NH, D]` of the chosen heads; empty where no model drafted.
        counts: how many of a row's tokens are a proposal, `[B]`; None for all.
    """

    tokens: torch.Tensor
    probs: torch.Tensor | None
    queries: Queries
    counts: torch.Tensor | None = None


class Proposer(ABC):
    """Drafts a block for every row.

    Attributes:
        model: what it runs, to be switched to the "dustin" attention; None where it runs no model.
        cache: what lookahead queries are scored against; the target's where there is no other.
    """

    model: "PreTrainedModel | None"
    cache: DustinCache

    @abstractmethod
    def propose(self, at: DraftRequest) -> Draft:
        """Draft up to `at.gamma` tokens for every row, and write them into `at.sequences`."""

    def choose_view(self, scores: torch.Tensor, lengths: torch.Tensor) -> DraftView | None:
        """What the drafts of the next step attend to, from the draft's scores `[B, T]`; None unless they are sparse."""
        return None

    @abstractmethod
    def commit(self, before: torch.Tensor, after: torch.Tensor, gamma: int) -> None:
        """Take note that the target's cache has gone from `before` to `after` tokens, `[B]`, in a step of `gamma`."""


class ModelProposer(Proposer):
    """Drafts with a model, one token per forward.

    Args:
        forward: of an assistant model, or of the target itself.
        cache: the assistant's own cache; for the target itself the target's, so that its prefill is shared.
        shared: whether `cache` is the target's. An own cache lacks the last token of a block that was accepted whole,
            so there the first forward of a step takes the last two tokens.
        vocab_size: the target's.
        processors: applied to the draft's scores (`processing.for_drafts`).
        do_sample: draw the tokens instead of taking the best.
        heads: layer -> query heads to keep the queries of.
        limit: column at which rows end.
        kind: what to attend to: `"full"`, the whole row; `"streaming"`, `sinks` and the most recent tokens, `size` in
            all; `"sparse"`, the `size` tokens that the draft's last scores chose and all that came after (ours).
        sinks, window: protected tokens of a choice.
        size: slots of a choice.
        gamma: most tokens drafted in a step.
    """

    def __init__(
        self,
        forward: Forward,
        cache: DustinCache,
        *,
        shared: bool,
        vocab_size: int,
        processors: LogitsProcessorList,
        do_sample: bool,
        heads: Heads,
        limit: int,
        kind: str,
        sinks: int,
        window: int,
        size: int,
        gamma: int,
    ):
        self.forward: Forward = forward
        self.model: PreTrainedModel = forward.model
        self.cache, self.heads = cache, heads
        self.catch_up = 0 if shared else 1
        self.vocab_size = vocab_size
        self.own_vocab_size = self.model.config.get_text_config(decoder=True).vocab_size
        self.processors, self.do_sample = processors, do_sample
        self.limit, self.kind, self.sinks, self.window, self.size = limit, kind, sinks, window, size
        self.gamma = gamma

    def propose(self, at: DraftRequest) -> Draft:
        sequences, first, lengths, gamma = at.sequences, at.first, at.lengths, at.gamma
        rows = torch.arange(len(sequences), device=sequences.device)[:, None]
        ahead = torch.arange(-1 - self.catch_up, 0, device=sequences.device)
        # a row of one token has no token before it: column -1 - catch_up may be a pad, its slot -1 is skipped
        ids = sequences[rows, (first[:, None] + ahead).clamp(min=0)]
        start = lengths - self.catch_up
        probs: list[torch.Tensor] = []
        blocks: list[Queries] = []
        for i in range(gamma):
            attention = BlockAttention(start, self._selection(start, at.view), self.heads)
            logits = self.forward(self.cache, self.embeddable(ids), attention, logits_to_keep=1)
            blocks.append({layer: q[:, -1:] for layer, q in attention.queries.items()})
            here = None if at.columns is None else [column + i for column in at.columns]
            logits = self.in_target_vocabulary(logits)
            scores = process_block(self.processors, sequences, first + i, here, self.limit, logits)[:, 0]
            if self.do_sample:
                # where processors rule out all that the draft knows, any token is as good
                probs.append(scores.float().softmax(-1).nan_to_num(1 / scores.shape[-1]))
                ids = torch.multinomial(probs[-1], 1)
            else:
                ids = scores.argmax(-1, keepdim=True)
            sequences[rows, first[:, None] + i] = ids
            start = lengths + i + 1
        tokens = sequences[rows, first[:, None] + torch.arange(gamma, device=sequences.device)]
        queries = {layer: torch.cat([block[layer] for block in blocks], dim=1) for layer in blocks[0]}
        return Draft(tokens, torch.stack(probs, dim=1) if self.do_sample else None, queries)

    def choose_view(self, scores: torch.Tensor, lengths: torch.Tensor) -> DraftView | None:
        if self.kind != "sparse":
            return None
        no_quota = torch.zeros_like(lengths)  # one tier is enough: the second, by the same scores
        slots = topk_select(scores, scores, lengths, no_quota, self.sinks, self.window, self.size)
        return DraftView(slots, lengths.clone())

    def _selection(self, start: torch.Tensor, view: DraftView | None) -> Selection:
        if self.kind == "streaming":
            return Selection(streaming_slots(start, self.sinks, self.size))
        if self.kind == "full" or view is None:
            return Selection()
        # behind the choice lie a block that was accepted whole, and the drafts of this step
        recent = recent_slots(start, view.since, 2 * self.gamma)
        return Selection(torch.cat([view.slots, recent], dim=1)[None, :, None])

    def commit(self, before: torch.Tensor, after: torch.Tensor, gamma: int) -> None:
        """An own cache holds the inputs of the draft's forwards: not the last draft, and nothing where none ran."""
        if self.catch_up:
            self.cache.lengths = torch.minimum(after, before + gamma if gamma > 0 else self.cache.lengths)

    def embeddable(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids that the draft can embed; one of the target's padding ids could only cost acceptance."""
        return ids.clamp(max=self.own_vocab_size - 1)

    def in_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over the target's vocabulary: ids the draft lacks get probability 0, ids the target lacks are cut."""
        missing = self.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


class NoProposer(Proposer):
    """Drafts nothing: for steps of gamma 0, which decode token by token.

    Args:
        cache: the target's.
    """

    model = None

    def __init__(self, cache: DustinCache):
        self.cache = cache

    def propose(self, at: DraftRequest) -> Draft:
        raise ValueError(f"`gamma` must be 0 without a draft, got {at.gamma}")

    def commit(self, before: torch.Tensor, after: torch.Tensor, gamma: int) -> None:
        """Nothing is kept from step to step."""


class PromptLookupProposer(Proposer):
    """Drafts what followed the last few tokens where they stood in the text before (prompt lookup decoding).

    Args:
        cache: the target's.
        vocab_size: the target's.
        do_sample: whether acceptance needs the probabilities of the drafts: 1, since nothing is drawn.
        max_ngram: longest run of tokens to look for; shorter ones are tried after it, the leftmost match is taken.
    """

    model = None

    def __init__(self, cache: DustinCache, *, vocab_size: int, do_sample: bool, max_ngram: int):
        self.cache, self.vocab_size, self.do_sample, self.max_ngram = cache, vocab_size, do_sample, max_ngram

    def propose(self, at: DraftRequest) -> Draft:
        sequences, first, lengths, gamma = at.sequences, at.first, at.lengths, at.gamma
        rows = torch.arange(len(sequences), device=sequences.device)[:, None]
        begin = first - lengths - 1  # pads of each row
        source = first.clone()  # column of the first token to copy; `first` itself where nothing was found
        for size in range(min(self.max_ngram, sequences.shape[1]), 0, -1):
            windows = sequences.unfold(1, size, 1)  # [B, columns - size + 1, size]
            ngram = sequences[rows, first[:, None] + torch.arange(-size, 0, device=first.device)]
            places = torch.arange(windows.shape[1], device=first.device)
            inside = (places >= begin[:, None]) & (places + size < first[:, None])
            matches = (windows == ngram[:, None]).all(-1) & inside & (first - begin > size)[:, None]
            found = matches.any(1) & (source == first)
            source = torch.where(found, matches.long().argmax(1) + size, source)
        ahead = torch.arange(gamma, device=first.device)
        tokens = sequences[rows, (source[:, None] + ahead).clamp(max=sequences.shape[1] - 1)]
        tokens = tokens.clamp(0, self.vocab_size - 1)  # where nothing was found they are pads, which may be no ids
        sequences[rows, first[:, None] + ahead] = tokens
        probs = torch.nn.functional.one_hot(tokens, self.vocab_size).float() if self.do_sample else None
        return Draft(tokens, probs, {}, (first - source).clamp(max=gamma))

    def commit(self, before: torch.Tensor, after: torch.Tensor, gamma: int) -> None:
        """Nothing is kept from step to step."""
