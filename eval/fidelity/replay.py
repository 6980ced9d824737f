"""Teacher-forced replay: the full cache's own continuation run again under selection policies, window by window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.enabling import enable
from dustin_hf.eval.fidelity.lanes import Lane, rates, window_truth
from dustin_hf.eval.fidelity.policies import OraclePolicy
from dustin_hf.forward import StockForward, input_device
from dustin_hf.model_patches.attention import BlockAttention, block_attention
from dustin_hf.model_patches.families import family_of
from dustin_hf.prefill import prefill
from dustin_hf.profile import Heads
from dustin_hf.profiling.rows import all_heads
from dustin_hf.scoring import Queries
from dustin_hf.selection import FullPolicy, Selection, SelectionPolicy, Signals
from dustin_hf.validation import check_pair, check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What is replayed: the greedy continuations of the full cache, or those that were given.

    Args:
        tokens: `[B, T]`, on the CPU.
        counted: tokens that are measured, `[B, T]`, bool: those before the one that ends the text.
    """

    tokens: torch.Tensor
    counted: torch.Tensor


@dataclass(frozen=True, slots=True)
class Replayed:
    """How one policy's run compares with the full cache on the same tokens; all on the CPU.

    Args:
        kl: KL(full || sparse) of the distribution after each token, `[B, T]` float32 (paper equation 8).
        same: whether both distributions have the same best token, `[B, T]` bool.
        nll: negative log-likelihood of the next token in nats, `[B, T]` float32; NaN after the last one.
        arr: windowed attention recovery rate (paper equation 2), the window's own tokens included, mean over layers,
            `[B, W]`; NaN where none of a window's tokens is counted.
        arr_committed: the same over committed tokens alone, `[B, W]`.
    """

    kl: torch.Tensor
    same: torch.Tensor
    nll: torch.Tensor
    arr: torch.Tensor
    arr_committed: torch.Tensor


@torch.no_grad()
def replay(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    contexts: Sequence[Sequence[int]],
    policies: Sequence[SelectionPolicy],
    *,
    new_tokens: int,
    gamma: int = 4,
    continuations: Sequence[Sequence[int]] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Trajectory, list[Replayed]]:
    """Run the full cache's greedy continuations again under each policy, as real sparse runs.

    Each context is prefilled, and its last token is run over the full cache, as a run's first step is, so that the
    first window has a history. Then, for every window of `gamma` tokens of the continuation: the draft runs them over
    its own full cache (its lookahead); a policy selects by the code that runs online; the target runs the window over
    the selected slots and the window itself; all of it is committed. So later keys, values and histories are those of
    the sparse run, whose errors feed back. Distributions are compared with those of a dense run of the same blocks.

    Memory: one cache of each model for the batch. All policies share the slots of the contexts; each keeps keys and
    values of its new tokens beside them. Of logits and attention rows only those of one window are held. The models
    are left as found; a model may be its own draft.

    Args:
        target: its verification is sparse.
        draft: it looks ahead; of the same tokenizer.
        contexts: token ids of each row; lengths may differ.
        policies: any; every row of each is treated by itself.
        new_tokens: tokens of a continuation (T); fewer where every row ends earlier.
        gamma: tokens of a window (w of paper equation 2).
        continuations: `new_tokens` tokens of each row, to be replayed instead of greedy ones.
        progress: called with the windows done and in all.

    Returns:
        The trajectory, and what came of each policy, in their order.

    Raises:
        ValueError: on contexts that are empty or do not fit a model, or a draft of another tokenizer.
        UnsupportedModelError: if a model's architecture is not supported.
    """
    _check(target, draft, contexts, new_tokens, gamma)
    if continuations is not None and [len(row) for row in continuations] != [new_tokens] * len(contexts):
        raise ValueError(
            f"`continuations` must be a row of {new_tokens} tokens for each of {len(contexts)} contexts, got rows of "
            f"{[len(row) for row in continuations]}"
        )
    with enable(target), enable(draft), block_attention(target, draft):
        return _Replay(target, draft, contexts, policies, new_tokens, gamma, continuations).run(progress)


def _check(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    contexts: Sequence[Sequence[int]],
    new_tokens: int,
    gamma: int,
) -> None:
    check_pair(target, draft)
    if not contexts or not all(len(ids) for ids in contexts):
        raise ValueError("`contexts` must be one or more rows of at least one token")
    if new_tokens < 1 or gamma < 1:
        raise ValueError(f"`new_tokens` and `gamma` must be positive, got {new_tokens} and {gamma}")
    for name, model in (("target", target), ("draft", draft)):
        check_positions(model.config, max(map(len, contexts)) + new_tokens, name)


class _Replay:
    """One batch: the caches, the dense run and a lane for each policy."""

    def __init__(
        self,
        target: "PreTrainedModel",
        draft: "PreTrainedModel",
        contexts: Sequence[Sequence[int]],
        policies: Sequence[SelectionPolicy],
        new_tokens: int,
        gamma: int,
        continuations: Sequence[Sequence[int]] | None,
    ):
        self.target, self.gamma, self.contexts = target, gamma, [len(ids) for ids in contexts]
        self.forward, self.draft_forward = StockForward(target), StockForward(draft)
        config = target.config.get_text_config(decoder=True)
        self.scale = family_of(config).scale(config)
        self.draft_vocabulary = draft.config.get_text_config(decoder=True).vocab_size
        self.cache = self._prefilled(target, contexts, new_tokens)
        self.draft_cache = self._prefilled(draft, contexts, new_tokens)
        self.device = self.cache.lengths.device
        self.wanted = {layer: all_heads(draft)[layer] for policy in policies for layer in policy.draft_heads}

        last = torch.tensor([[ids[-1]] for ids in contexts], device=self.device)
        queries = self._first(last)
        if continuations is None:
            self.tokens, self.counted = self._continuation(last, new_tokens)
        else:
            self.tokens = torch.tensor([list(row) for row in continuations], device=self.device)
            self.counted = torch.ones_like(self.tokens, dtype=torch.bool)
        self.dense = Lane(FullPolicy(), {})
        self.lanes = [Lane(policy, _of_heads(queries, policy.target_heads)) for policy in policies]
        # what the contexts' last tokens left: committed in both caches
        for cache in (self.cache, self.draft_cache):
            cache.lengths = cache.lengths + 1

    def _prefilled(self, model: "PreTrainedModel", contexts: Sequence[Sequence[int]], new_tokens: int) -> DustinCache:
        """A cache of every context but its last token."""
        device, width = input_device(model), max(self.contexts)
        config = model.config.get_text_config(decoder=True)
        cache = DustinCache(config.num_hidden_layers, len(contexts), width + new_tokens, device)
        pads = [width - length for length in self.contexts]
        rows = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(pads, contexts)], device=device)
        prefill(model, cache, rows.clamp(max=config.vocab_size - 1), pads, [0] * len(contexts))
        return cache

    def _first(self, last: torch.Tensor) -> Queries:
        """Run the contexts' last tokens `[B, 1]` over everything; the target's queries, all heads of every layer."""
        self._draft_block(last)
        attention = BlockAttention(self.cache.lengths.clone(), Selection(), all_heads(self.target))
        self.forward(self.cache, last, attention, logits_to_keep=1)
        return attention.queries

    def _draft_block(self, ids: torch.Tensor) -> Queries:
        attention = BlockAttention(self.draft_cache.lengths.clone(), Selection(), self.wanted)
        own = ids.clamp(max=self.draft_vocabulary - 1).to(self.draft_cache.lengths.device)
        self.draft_forward(self.draft_cache, own, attention, logits_to_keep=1)
        return attention.queries

    def _continuation(self, ids: torch.Tensor, new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens `[B, T]` over the full cache, and those that count: up to the end of the last row's window."""
        config = self.target.generation_config
        ends = config.eos_token_id if config is not None and config.eos_token_id is not None else []
        stops = torch.tensor(ends, dtype=torch.long, device=self.device).reshape(-1)
        start, tokens = self.cache.lengths.clone(), []
        for i in range(new_tokens):
            logits = self.forward(self.cache, ids, BlockAttention(start + i, Selection(), {}), logits_to_keep=1)
            ids = logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(ids)
        found = torch.cat(tokens, dim=1)
        counted = torch.isin(found, stops).cumsum(1) == 0
        # whole windows, so that no row depends on where its neighbours end
        most = -(-int(counted.sum(1).max()) // self.gamma) * self.gamma
        return found[:, :most], counted[:, :most]

    def run(self, progress: Callable[[int, int], None] | None) -> tuple[Trajectory, list[Replayed]]:
        begins = range(0, self.tokens.shape[1], self.gamma)
        for done, begin in enumerate(begins, 1):
            self._window(*(x[:, begin : begin + self.gamma] for x in (self.tokens, self.counted, self.tokens[:, 1:])))
            if progress is not None:
                progress(done, len(begins))
        return Trajectory(self.tokens.cpu(), self.counted.cpu()), [self._replayed(lane) for lane in self.lanes]

    def _window(self, ids: torch.Tensor, counted: torch.Tensor, following: torch.Tensor) -> None:
        """One window `[B, L]` in every run; `following` are the tokens after each of its own, one fewer at the end."""
        # a copy: committing changes the lengths in place
        lengths = self.cache.lengths.clone()
        ones = torch.ones_like(lengths)
        self.dense.load(self.cache, self.contexts)
        logits, queries = self._block(self.dense, ids, lengths, Selection(), all_heads(self.target))
        reference, best = logits.float().log_softmax(-1), logits.argmax(-1)
        truth, new_mass = window_truth(queries, self.cache, counted, self.scale)
        lookahead = self._draft_block(ids)
        draft_scores: dict[int, torch.Tensor] = {}  # most policies share a scorer
        for lane in self.lanes:
            policy = lane.policy
            lane.load(self.cache, self.contexts)
            if isinstance(policy, OraclePolicy):
                policy.truth = truth
            asked = _of_heads(lookahead, policy.draft_heads)
            to_come, past = policy.draft_scorer, policy.target_scorer
            if to_come is not None and id(to_come) not in draft_scores:
                draft_scores[id(to_come)] = to_come(asked, self.draft_cache, lengths, ones * ids.shape[1])
            selection = policy.select(
                Signals(
                    lengths,
                    self.cache,
                    lane.history,
                    self.draft_cache,
                    asked,
                    ones * ids.shape[1],
                    ones * ids.shape[1],
                    None if past is None else past(lane.history, self.cache, lengths, ones),
                    None if to_come is None else draft_scores[id(to_come)],
                )
            )
            logits, queries = self._block(lane, ids, lengths, selection, policy.target_heads)
            lane.history = {layer: q[:, -1:].clone() for layer, q in queries.items()}
            sparse = logits.float().log_softmax(-1)
            kl = torch.nn.functional.kl_div(sparse, reference, reduction="none", log_target=True).sum(-1)
            nll = kl.new_full(kl.shape, torch.nan)
            nll[:, : following.shape[1]] = -sparse[:, : following.shape[1]].gather(2, following[..., None])[..., 0]
            found = kl, logits.argmax(-1) == best, nll, *rates(truth, new_mass, selection, counted)
            lane.scores.append(tuple(x.cpu() for x in found))
        self.cache.lengths = lengths + ids.shape[1]
        self.draft_cache.lengths = self.draft_cache.lengths + ids.shape[1]

    def _block(
        self, lane: Lane, ids: torch.Tensor, lengths: torch.Tensor, selection: Selection, heads: Heads
    ) -> tuple[torch.Tensor, Queries]:
        """Run a window in a lane whose tokens are loaded: its logits `[B, L, V]` and queries."""
        attention = BlockAttention(lengths, selection, heads)
        logits = self.forward(self.cache, ids, attention)
        lane.keep(self.cache, lengths, ids.shape[1])
        return logits, attention.queries

    @staticmethod
    def _replayed(lane: Lane) -> Replayed:
        if not lane.scores:
            empty = torch.zeros(0)
            return Replayed(empty, empty.bool(), empty, empty, empty)
        kl, same, nll, arr, committed = zip(*lane.scores)
        tokens = torch.cat(kl, 1), torch.cat(same, 1), torch.cat(nll, 1)
        return Replayed(*tokens, torch.stack(arr, 1), torch.stack(committed, 1))


def _of_heads(queries: Queries, heads: Heads) -> Queries:
    """Some heads of queries that hold all heads of their layers."""
    return {layer: queries[layer][:, :, list(chosen)] for layer, chosen in heads.items()}
