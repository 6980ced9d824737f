"""What a replay compares: the registered policies, baselines, and oracles that are shown the attention to come."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from dustin_hf.config import DustinConfig
from dustin_hf.eval.baselines.streaming import StreamingPolicy
from dustin_hf.model_patches.families import family_of
from dustin_hf.profile import DustinProfile
from dustin_hf.profiling.recovery import oracle_set
from dustin_hf.scoring import HeadScorer
from dustin_hf.selection import (
    FullPolicy,
    PolicyContext,
    Selection,
    SelectionPolicy,
    Signals,
    build_policy,
    policy_names,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OraclePolicy(SelectionPolicy):
    """The slots with the most attention of the window to come, nothing protected (paper equation 3).

    Args:
        k: slots in all.
        per_layer: a set for each layer, else the best one for all.

    Attributes:
        truth: attention of the full cache that the window will pay to committed tokens, mean over its queries and the
            heads of a layer, `[B, layers, T]`. A replay puts it there before each window; no run could.
    """

    truth: torch.Tensor | None = None

    def __init__(self, k: int, per_layer: bool = False):
        self.k, self.per_layer = k, per_layer

    def select(self, signals: Signals) -> Selection:
        if self.truth is None:
            raise RuntimeError("an OraclePolicy has to be shown the attention to come: it works in a replay only")
        k = min(self.k, self.truth.shape[2])
        slots = oracle_set(self.truth, signals.lengths, k, per_layer=self.per_layer)
        if not self.per_layer:
            return Selection(slots[None, :, None])
        return Selection(slots.transpose(0, 1)[:, :, None].contiguous(), tuple(range(slots.shape[1])))


@dataclass(frozen=True, slots=True)
class Arm:
    """One policy of a comparison.

    Args:
        mode: its name.
        budget: slots that it may choose (k); None where it takes all.
        policy: ready to select.
    """

    mode: str
    budget: int | None
    policy: SelectionPolicy


# By name, from k and sinks. The registered policies (`register_policy`) come on top.
EVALUATED = {
    "streaming": lambda k, sinks: StreamingPolicy(k, sinks),
    "oracle": lambda k, sinks: OraclePolicy(k),
    "oracle-layers": lambda k, sinks: OraclePolicy(k, per_layer=True),
}


def mode_names() -> tuple[str, ...]:
    """The names that `build_arms` takes."""
    return *policy_names(), *EVALUATED


def check_arms(modes: Sequence[str], budgets: Sequence[int], sinks: int, window: int) -> None:
    """Raise `ValueError` on what `build_arms` would, which needs the models."""
    unknown = [mode for mode in modes if mode not in mode_names()]
    if unknown:
        raise ValueError(f"`mode` must be of {', '.join(mode_names())}, got {', '.join(map(repr, unknown))}")
    if not modes or not budgets:
        raise ValueError(f"`modes` and `budgets` leave nothing to compare: {list(modes)}, {list(budgets)}")
    for budget in budgets:
        DustinConfig(budget=budget, sinks=sinks, window=window)


def build_arms(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    profile: DustinProfile,
    modes: Iterable[str],
    budgets: Sequence[int],
    sinks: int,
    window: int,
) -> list[Arm]:
    """Every mode at every budget; `"full"` once.

    Args:
        target: model whose verification is sparse.
        draft: model that looks ahead.
        profile: of the pair.
        modes: of `mode_names()`, user-registered ones included.
        budgets: k.
        sinks: protected tokens at the start.
        window: protected tokens at the end.

    Raises:
        ValueError: on an unknown mode, one that chooses once, a budget that leaves nothing to choose, or nothing to
            compare.
    """
    modes, budgets = list(dict.fromkeys(modes)), list(dict.fromkeys(budgets))
    check_arms(modes, budgets, sinks, window)
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    by_target, by_draft = (
        HeadScorer(heads, family_of(config).group(config), family_of(config).scale(config))
        for config, heads in zip(configs, (profile.target_heads, profile.draft_heads))
    )
    arms = [Arm("full", None, FullPolicy())] if "full" in modes else []
    for budget in budgets:
        options = DustinConfig(budget=budget, sinks=sinks, window=window)
        for mode in modes:
            if mode in EVALUATED:
                arms.append(Arm(mode, budget, EVALUATED[mode](budget, sinks)))
            elif mode != "full":
                context = PolicyContext(
                    replace(options, mode=mode), profile, by_target, by_draft, configs[0], configs[1]
                )
                policy = build_policy(context)
                if policy.prompt_tail:
                    raise ValueError(
                        f"`mode` {mode!r} chooses once, at the end of the prompt, and a replay compares what is chosen "
                        "for each window: leave it out"
                    )
                arms.append(Arm(mode, budget, policy))
    return arms
