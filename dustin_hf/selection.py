"""Which cached tokens verification attends to: the policy interface, hybrid selection (paper equation 6), and full."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.config import DustinConfig
from dustin_hf.kernels.topk_select import topk_select
from dustin_hf.profile import DustinProfile, Heads, LayerGroup
from dustin_hf.scoring import HeadScorer, Queries

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class Selection:
    """The slots of one step.

    Args:
        indices: `[n_sets, B, 1 or H, k]` int32, -1 for unused places; None: every committed token (full attention).
        layer_sets: the set of each target layer; None: set 0 for all.
        choose: instead of both, asked by each layer once its queries are there (`LayerChoice`).
    """

    indices: torch.Tensor | None = None
    layer_sets: tuple[int, ...] | None = None
    choose: "LayerChoice | None" = None


# layer, queries of the block `[B, L, HQ, D]`, keys of the cache `[B, H, T, D]`, committed tokens `[B]` -> the layer's
# slots, `[B, 1 or H, k]` int32, -1 for unused places; None for every committed token
LayerChoice = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Signals:
    """What a policy may look at; committed tokens only.

    Args:
        lengths: committed tokens in the target cache, `[B]`.
        target_cache: keys to score against.
        target_queries: layer -> `[B, 1, NH, D]`, queries of the last token that the target has processed.
        draft_cache: the draft's cache.
        draft_queries: layer -> `[B, gamma, NH, D]`, the lookahead queries; empty where no model drafted in this step.
        draft_counts: lookahead queries of each row that count, `[B]`; rows near their limit have fewer than gamma.
        block_counts: tokens of the block to verify that count, `[B]`: one more than drafts.
        target_scores, draft_scores: of the policy's scorers, `[B, T]` float32; None where it has none, or where no
            model drafted.
    """

    lengths: torch.Tensor
    target_cache: DustinCache
    target_queries: Queries
    draft_cache: DustinCache
    draft_queries: Queries
    draft_counts: torch.Tensor
    block_counts: torch.Tensor
    target_scores: torch.Tensor | None = None
    draft_scores: torch.Tensor | None = None


class SelectionPolicy(ABC):
    """Chooses the slots of each step.

    `target_heads` and `draft_heads` name the query heads (layer -> heads) that the forwards have to keep for it, and
    `target_scorer` and `draft_scorer`, where there are any, turn their queries into scores before it is asked.
    The first step after a prefill has no history and is verified in full, so `select` is not asked for it.
    """

    target_heads: Heads = {}
    draft_heads: Heads = {}
    target_scorer: HeadScorer | None = None
    draft_scorer: HeadScorer | None = None
    prompt_tail = 0  # tokens that `begin` needs; without any it is not called

    @property
    def signature(self) -> tuple:
        """What its choice depends on, besides signals: captured steps are used again by policies of equal signature."""
        return (id(self),)

    def begin(self, model: "PreTrainedModel", cache: DustinCache, tail: torch.Tensor) -> None:  # noqa: B027
        """Look at the prompts once, after the prefill and before the first step.

        Args:
            model: the target, switched to the "dustin" attention.
            cache: holds all tokens of the prompts but the last.
            tail: the last `prompt_tail` of those tokens, `[B, prompt_tail]`; zeros where a row has fewer.
        """

    @abstractmethod
    def select(self, signals: Signals) -> Selection:
        """The slots of this step. Must not change the caches, and must treat every row by itself."""


class FullPolicy(SelectionPolicy):
    """Every committed token: vanilla verification."""

    @property
    def signature(self) -> tuple:
        return (type(self).__name__,)

    def select(self, signals: Signals) -> Selection:
        return Selection()


class HybridPolicy(SelectionPolicy):
    """Sinks, window, the top m by the draft's lookahead, the rest by the target's history (paper equations 5 and 6).

    Args:
        k: slots in all.
        sinks, window: protected tokens, counted in `k`.
        m: slots given to the draft.
        target, draft: scorers of the chosen heads of both models; `draft` is None where m is 0.

    A row without lookahead in a step (its last token; prompt lookup) gives its m to the target's history.
    """

    def __init__(self, *, k: int, sinks: int, window: int, m: int, target: HeadScorer, draft: HeadScorer | None):
        self.k, self.sinks, self.window, self.m = k, sinks, window, m
        self.target_scorer, self.draft_scorer = target, draft
        self.target_heads = target.heads
        self.draft_heads = draft.heads if draft is not None else {}

    @property
    def signature(self) -> tuple:
        heads = (tuple(self.target_heads.items()), tuple(self.draft_heads.items()))
        return (type(self).__name__, self.k, self.sinks, self.window, self.m, *heads)

    def select(self, signals: Signals) -> Selection:
        target_scores = signals.target_scores
        assert target_scores is not None
        draft_scores = signals.draft_scores
        if draft_scores is None:
            draft_scores = torch.zeros_like(target_scores)
        capacity = signals.target_cache.capacity
        sinks = min(self.sinks, capacity)
        indices = topk_select(
            draft_scores,
            target_scores,
            signals.lengths,
            torch.where(signals.draft_counts > 0, self.m, 0),
            sinks,
            min(self.window, capacity - sinks),
            min(self.k, capacity),
        )
        return Selection(indices[None, :, None])


class LayeredPolicy(SelectionPolicy):
    """A hybrid set of its own for each group of target layers (ours).

    Args:
        begins: first layer of each group, from 0 on.
        parts: the policy of each.
        layers: of the target.

    The lookahead scores of the last group that has any are those that sparse drafts go by.
    """

    def __init__(self, begins: Sequence[int], parts: Sequence[HybridPolicy], layers: int):
        self.parts = tuple(parts)
        self.layer_sets = tuple(bisect_right(begins, layer) - 1 for layer in range(layers))
        self.target_heads = {layer: heads for part in parts for layer, heads in part.target_heads.items()}
        self.draft_heads = {layer: heads for part in parts for layer, heads in part.draft_heads.items()}
        self.draft_scorer = next((part.draft_scorer for part in reversed(self.parts) if part.draft_heads), None)

    @property
    def signature(self) -> tuple:
        return (type(self).__name__, self.layer_sets, *(part.signature for part in self.parts))

    def select(self, signals: Signals) -> Selection:
        lengths, ones = signals.lengths, torch.ones_like(signals.lengths)
        found, known = [], dict[tuple, torch.Tensor]()
        for part in self.parts:
            assert part.target_scorer is not None
            heads = tuple(part.target_heads.items())
            if heads not in known:  # groups often share the layer that knows best
                known[heads] = part.target_scorer(signals.target_queries, signals.target_cache, lengths, ones)
            by_target, by_draft = known[heads], signals.draft_scores
            if by_draft is not None and part.draft_scorer not in (None, self.draft_scorer):
                assert part.draft_scorer is not None
                by_draft = part.draft_scorer(signals.draft_queries, signals.draft_cache, lengths, signals.draft_counts)
            own = part.select(replace(signals, target_scores=by_target, draft_scores=by_draft)).indices
            assert own is not None
            found.append(own)
        return Selection(torch.cat(found), self.layer_sets)


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy is built from: the user's options, the profile, the scorers of both models' chosen heads, and both
    models' configs (the target's twice where no model drafts).
    """

    config: DustinConfig
    profile: DustinProfile
    target_scorer: HeadScorer
    draft_scorer: HeadScorer
    target_config: "PreTrainedConfig"
    draft_config: "PreTrainedConfig"


PolicyFactory = Callable[[PolicyContext], SelectionPolicy]
_FACTORIES: dict[str, PolicyFactory] = {}


def register_policy(name: str, factory: PolicyFactory) -> None:
    """Make a policy available as `cache_config={"mode": name}`; `unregister_policy` undoes it.

    For one that reads what was written last:

        class Recent(SelectionPolicy):
            def __init__(self, budget):
                self.budget = budget

            def select(self, signals):  # slots from length - budget on, -1 for those that are not there
                lengths = signals.lengths[:, None]
                slots = lengths - self.budget + torch.arange(self.budget, device=lengths.device)
                return Selection(slots.clamp(min=-1).int()[None, :, None])  # [n_sets, B, 1 or H, k]

        register_policy("recent", lambda context: Recent(context.config.budget))

    Args:
        name: what `mode` takes.
        factory: called once a call with a `PolicyContext` (options, profile, scorers, configs); returns the policy.

    Raises:
        ValueError: if the name is taken, or the factory cannot be called.
    """
    if not callable(factory):
        raise ValueError(f"`factory` must be callable with a PolicyContext, got {type(factory).__name__}")
    if name in _FACTORIES:
        raise ValueError(f"`name` {name!r} is already a selection policy; registered are {policy_names()}")
    _FACTORIES[name] = factory


def unregister_policy(name: str) -> None:
    """Undo `register_policy`; a name that is not registered is fine."""
    _FACTORIES.pop(name, None)


def policy_names() -> tuple[str, ...]:
    """The names that `mode` takes."""
    return tuple(_FACTORIES)


def build_policy(context: PolicyContext) -> SelectionPolicy:
    """The policy that `context.config.mode` names.

    Raises:
        ValueError: if what was registered makes none.
    """
    policy = _FACTORIES[context.config.mode](context)
    if not isinstance(policy, SelectionPolicy):
        raise ValueError(
            f"the factory of mode {context.config.mode!r} must return a SelectionPolicy, got {type(policy).__name__}"
        )
    return policy


def _hybrid(share: float | None) -> PolicyFactory:
    def build(
        config: DustinConfig, found: DustinProfile | LayerGroup, target: HeadScorer, draft: HeadScorer
    ) -> HybridPolicy:
        part = share
        if part is None:
            part = config.draft_share if config.draft_share is not None else found.share_for(config.budget)
        return HybridPolicy(
            k=config.budget,
            sinks=config.sinks,
            window=config.window,
            m=round(part * config.budget),
            target=target,
            draft=draft if part > 0 else None,
        )

    def factory(context: PolicyContext) -> SelectionPolicy:
        config, groups = context.config, context.profile.layer_groups
        target, draft = context.target_scorer, context.draft_scorer
        if not groups:
            return build(config, context.profile, target, draft)
        parts = [build(config, group, target.of(group.target_heads), draft.of(group.draft_heads)) for group in groups]
        return LayeredPolicy([group.first_layer for group in groups], parts, context.target_config.num_hidden_layers)

    return factory


register_policy("hybrid", _hybrid(None))
register_policy("target", _hybrid(0.0))
register_policy("draft", _hybrid(1.0))
register_policy("full", lambda context: FullPolicy())
