"""Proposers: what drafts a block for every row, and keeps the queries that look ahead."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.generation.logits_process import LogitsProcessorList

from dustin_hf._compat import CACHE_ARG
from dustin_hf.cache import DustinCache
from dustin_hf.model_patches.attention import BlockAttention
from dustin_hf.processing import process_block
from dustin_hf.profile import Heads
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def input_device(model: "PreTrainedModel") -> torch.device:
    """Where a model takes its ids. Offloaded weights are placeholders between forwards; accelerate's hook knows."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return next(embeddings.parameters()).device if device is None else torch.device(device)


def forward_block(
    model: "PreTrainedModel", cache: DustinCache, ids: torch.Tensor, attention: BlockAttention, logits_to_keep: int = 0
) -> torch.Tensor:
    """Run new tokens of every row through a model, writing their keys and values at `attention.start`.

    Args:
        model: switched to the "dustin" attention (`block_attention`).
        cache: its storage is written, its lengths are not.
        ids: new tokens, `[B, L]`.
        attention: what they attend to.
        logits_to_keep: positions to return, counted from the end; 0 for all.

    Returns:
        Logits `[B, L or logits_to_keep, V]`, float32, on the device of `ids`.
    """
    positions = attention.start[:, None] + torch.arange(ids.shape[1], device=ids.device)
    device = input_device(model)
    with cache.writing_block(attention.start):
        out = model(
            input_ids=ids.to(device),
            position_ids=positions.clamp(min=0).to(device),
            # a 4D mask is taken as it is, and the "dustin" attention does not look at it
            attention_mask=ids.new_zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
            use_cache=True,
            logits_to_keep=logits_to_keep,
            dustin=attention,
            **{CACHE_ARG: cache},
        )
    return out.logits.to(device=ids.device, dtype=torch.float32)


def streaming_slots(lengths: torch.Tensor, sinks: int, size: int) -> torch.Tensor:
    """The first `sinks` and the most recent `size - sinks` slots of each row, `[1, B, 1, size]` int32 (MagicDec)."""
    places = torch.arange(size, device=lengths.device)
    recent = lengths[:, None] - size + places
    slots = torch.where(places < sinks, places, recent)
    # a recent slot that is a sink, or lies before the row, is unused: the row is shorter than `size`
    unused = torch.where(places < sinks, places >= lengths[:, None], recent < sinks)
    return slots.masked_fill(unused, -1).int()[None, :, None]


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
    def propose(
        self, sequences: torch.Tensor, first: torch.Tensor, columns: list[int] | None, lengths: torch.Tensor, gamma: int
    ) -> Draft:
        """Draft up to `gamma` tokens for every row.

        Args:
            sequences: left-padded tokens, `[B, W + gamma]` at least; drafts are written from `first[b]` on.
            first: first free column of each row, `[B]`.
            columns: the same as Python ints, where processors need them.
            lengths: tokens of each row in the target's cache, `[B]`: all but the last one.
            gamma: tokens to draft, at least 1.
        """

    @abstractmethod
    def commit(self, before: torch.Tensor, after: torch.Tensor, gamma: int) -> None:
        """Take note that the target's cache has gone from `before` to `after` tokens, `[B]`, in a step of `gamma`."""


class ModelProposer(Proposer):
    """Drafts with a model, one token per forward.

    Args:
        model: an assistant model, or the target itself.
        cache: the assistant's own cache; for the target itself the target's, so that its prefill is shared.
        shared: whether `cache` is the target's. An own cache lacks the last token of a block that was accepted whole,
            so there the first forward of a step takes the last two tokens.
        vocab_size: the target's.
        processors: applied to the draft's scores (`processing.for_drafts`).
        do_sample: draw the tokens instead of taking the best.
        heads: layer -> query heads to keep the queries of.
        limit: column at which rows end.
        sinks, streaming: attend to `sinks` and the most recent tokens, `streaming` in all; 0: to the whole row.
    """

    def __init__(
        self,
        model: "PreTrainedModel",
        cache: DustinCache,
        *,
        shared: bool,
        vocab_size: int,
        processors: LogitsProcessorList,
        do_sample: bool,
        heads: Heads,
        limit: int,
        sinks: int,
        streaming: int,
    ):
        self.model: PreTrainedModel = model
        self.cache, self.heads = cache, heads
        self.catch_up = 0 if shared else 1
        self.vocab_size = vocab_size
        self.own_vocab_size = model.config.get_text_config(decoder=True).vocab_size
        self.processors, self.do_sample = processors, do_sample
        self.limit, self.sinks, self.streaming = limit, sinks, streaming

    def propose(
        self, sequences: torch.Tensor, first: torch.Tensor, columns: list[int] | None, lengths: torch.Tensor, gamma: int
    ) -> Draft:
        rows = torch.arange(len(sequences), device=sequences.device)[:, None]
        ahead = torch.arange(-1 - self.catch_up, 0, device=sequences.device)
        # a row of one token has no token before it: column -1 - catch_up may be a pad, its slot -1 is skipped
        ids = sequences[rows, (first[:, None] + ahead).clamp(min=0)]
        start = lengths - self.catch_up
        probs: list[torch.Tensor] = []
        blocks: list[Queries] = []
        for i in range(gamma):
            selection = Selection(streaming_slots(start, self.sinks, self.streaming) if self.streaming else None)
            attention = BlockAttention(start, selection, self.heads)
            logits = forward_block(self.model, self.cache, self.embeddable(ids), attention, logits_to_keep=1)
            blocks.append({layer: q[:, -1:] for layer, q in attention.queries.items()})
            here = None if columns is None else [column + i for column in columns]
            logits = self.in_target_vocabulary(logits)
            scores = process_block(self.processors, sequences, here, self.limit, logits)[:, 0]
            if self.do_sample:
                probs.append(scores.softmax(-1))
                ids = torch.multinomial(probs[-1], 1)
            else:
                ids = scores.argmax(-1, keepdim=True)
            sequences[rows, first[:, None] + i] = ids
            start = lengths + i + 1
        tokens = sequences[rows, first[:, None] + torch.arange(gamma, device=sequences.device)]
        queries = {layer: torch.cat([block[layer] for block in blocks], dim=1) for layer in blocks[0]}
        return Draft(tokens, torch.stack(probs, dim=1) if self.do_sample else None, queries)

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

    def propose(
        self, sequences: torch.Tensor, first: torch.Tensor, columns: list[int] | None, lengths: torch.Tensor, gamma: int
    ) -> Draft:
        rows = torch.arange(len(sequences), device=sequences.device)[:, None]
        begin = first - lengths - 1  # pads of each row
        source = first.clone()  # column of the first token to copy; `first` itself where nothing was found
        for size in range(self.max_ngram, 0, -1):
            windows = sequences.unfold(1, size, 1)  # [B, columns - size + 1, size]
            ngram = sequences[rows, first[:, None] + torch.arange(-size, 0, device=first.device)]
            places = torch.arange(windows.shape[1], device=first.device)
            inside = (places >= begin[:, None]) & (places + size < first[:, None])
            matches = (windows == ngram[:, None]).all(-1) & inside & (first - begin > size)[:, None]
            found = matches.any(1) & (source == first)
            source = torch.where(found, matches.long().argmax(1) + size, source)
        ahead = torch.arange(gamma, device=first.device)
        tokens = sequences[rows, (source[:, None] + ahead).clamp(max=sequences.shape[1] - 1)]
        sequences[rows, first[:, None] + ahead] = tokens
        probs = torch.nn.functional.one_hot(tokens, self.vocab_size).float() if self.do_sample else None
        return Draft(tokens, probs, {}, (first - source).clamp(max=gamma))

    def commit(self, before: torch.Tensor, after: torch.Tensor, gamma: int) -> None:
        """Nothing is kept from step to step."""
