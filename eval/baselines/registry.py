"""Baselines by name, for `cache_config={"mode": ...}`; and the profile of the naive estimator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dustin_hf.eval.baselines.oracle import OraclePolicy
from dustin_hf.eval.baselines.quest import QuestPolicy
from dustin_hf.eval.baselines.snapkv import SnapKVPolicy
from dustin_hf.eval.baselines.specattn import SpecAttnPolicy
from dustin_hf.eval.baselines.streaming import StreamingPolicy
from dustin_hf.profile import DustinProfile, Heads
from dustin_hf.selection import (
    PolicyContext,
    PolicyFactory,
    SelectionPolicy,
    policy_names,
    register_policy,
    unregister_policy,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def _streaming(context: PolicyContext) -> SelectionPolicy:
    return StreamingPolicy(context.config.budget, context.config.sinks)


def _snapkv(context: PolicyContext) -> SelectionPolicy:
    return SnapKVPolicy(context.config.budget)


def _quest(context: PolicyContext) -> SelectionPolicy:
    return QuestPolicy(context.config.budget, context.target_scorer.scale)


def _specattn(context: PolicyContext) -> SelectionPolicy:
    config, scorer, layers = context.config, context.draft_scorer, context.target_config.num_hidden_layers
    heads = _all_heads(context.draft_config)
    return SpecAttnPolicy(config.budget, config.sinks, config.window, layers, heads, scorer.group, scorer.scale)


def _oracle(context: PolicyContext) -> SelectionPolicy:
    return OraclePolicy(context.config.budget, context.target_scorer.scale)


BASELINES: dict[str, PolicyFactory] = {
    "streaming": _streaming,
    "snapkv": _snapkv,
    "quest": _quest,
    "specattn": _specattn,
    "oracle": _oracle,
}


def register_baselines() -> None:
    """Make the baselines available to `generate`, as `cache_config={"mode": name}`; names that are taken stay."""
    for name, factory in BASELINES.items():
        if name not in policy_names():
            register_policy(name, factory)


@contextmanager
def registered_baselines() -> Iterator[None]:
    """The same for a while: the names that this has added are gone afterwards."""
    added = [name for name in BASELINES if name not in policy_names()]
    register_baselines()
    try:
        yield
    finally:
        for name in added:
            unregister_policy(name)


def naive_profile(target: "PreTrainedConfig", draft: "PreTrainedConfig") -> DustinProfile:
    """All heads of all layers of both models: the estimator that few heads replace (paper section 5.4.1)."""
    return DustinProfile(_all_heads(target), _all_heads(draft))


def _all_heads(config: "PreTrainedConfig") -> Heads:
    return {layer: tuple(range(config.num_attention_heads)) for layer in range(config.num_hidden_layers)}
