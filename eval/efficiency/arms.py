"""The arms of `bench decode`: ways to decode the same rows, all through the engine that `generate` uses."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from dustin_hf.acceptance import Accept, greedy_accept
from dustin_hf.cache import DustinCache
from dustin_hf.config import DustinConfig
from dustin_hf.drafting import ModelProposer, NoProposer, Proposer
from dustin_hf.eval.baselines import registered_baselines
from dustin_hf.forward import StockForward
from dustin_hf.model_patches.families import family_of
from dustin_hf.profile import DustinProfile, Heads
from dustin_hf.scoring import HeadScorer
from dustin_hf.selection import PolicyContext, build_policy
from dustin_hf.step import DecodeState, StepParts
from dustin_hf.stopping import Ending

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dustin_hf.eval.efficiency.shapes import Shape

SINKS, WINDOW = 4, 16


@dataclass(frozen=True, slots=True)
class Arm:
    """What verification reads, as `mode` of `cache_config`, and what the draft reads (None: there is no draft)."""

    name: str
    mode: str
    draft_cache: str | None

    @property
    def sparse(self) -> bool:
        """Whether verification reads a budget of slots."""
        return self.mode != "full"


ARMS = {
    arm.name: arm
    for arm in (
        Arm("vanilla", "full", None),
        Arm("classic", "full", "full"),
        Arm("magicdec", "full", "streaming"),
        Arm("specattn", "specattn", "full"),
        Arm("dustin", "hybrid", "full"),
        Arm("dustin-streaming", "hybrid", "streaming"),
        Arm("dustin-sparse", "hybrid", "sparse"),
    )
}


class SimulatedAcceptance:
    """Accepts each draft with one probability, up to the first that fails: for random weights, which never agree.

    Args:
        tau: mean tokens committed per step, the target's own included.
        gamma: drafts per step.
    """

    def __init__(self, tau: float, gamma: int):
        if not 1 <= tau <= gamma + 1:
            raise ValueError(f"`--tau` must be between 1 and gamma + 1 = {gamma + 1}, got {tau}")
        low, high = 0.0, 1.0
        for _ in range(50):
            self.probability = (low + high) / 2
            mean = sum(self.probability**i for i in range(gamma + 1))
            low, high = (self.probability, high) if mean < tau else (low, self.probability)

    def __call__(
        self, scores: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, _ = greedy_accept(scores, drafts)
        rows, gamma = drafts.shape
        # evenly spaced draws with a common shift: each row's are uniform, and the mean over rows has little noise
        shift = torch.rand(1, device=drafts.device)
        draw = (shift + torch.arange(rows, device=drafts.device) / rows) % 1.0
        chances = self.probability ** torch.arange(1, gamma + 1, device=drafts.device)
        return tokens, (draw[:, None] < chances).sum(-1)


def paper_heads(target: "Shape", draft: "Shape") -> DustinProfile:
    """4 target heads of one layer and 12 draft heads of three, as many as the paper uses, far apart in their layers."""

    def spread(shape: "Shape", layers: list[int]) -> Heads:
        return {layer: tuple(i * shape.q_heads // 4 for i in range(4)) for layer in layers}

    middle = int(0.6 * draft.layers)
    return DustinProfile(spread(target, [int(0.6 * target.layers)]), spread(draft, [middle - 1, middle, middle + 1]))


@dataclass
class Decode:
    """One arm, ready to step."""

    arm: Arm
    parts: StepParts
    state: DecodeState
    gamma: int
    start: torch.Tensor

    def rewind(self) -> None:
        """Forget what was decoded: every row is as long as it was at first."""
        self.parts.cache.lengths = self.start
        if self.parts.proposer.cache is not self.parts.cache:
            self.parts.proposer.cache.lengths = self.start


def build(
    arm: Arm,
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    caches: tuple[DustinCache, DustinCache],
    lengths: list[int],
    profile: DustinProfile,
    gamma: int,
    budget: int,
    new_tokens: int,
    accept: Accept,
) -> Decode:
    """An arm over caches that are filled already.

    Args:
        arm: which.
        target: a model.
        draft: a model.
        caches: theirs, with room for `max(lengths) + new_tokens` tokens.
        lengths: tokens of each row, all in the caches.
        profile: heads to score.
        gamma: drafts per step, where the arm drafts.
        budget: slots that verification reads, where it is sparse; also what a draft cache that is not full reads.
        new_tokens: most tokens that the rows will get.
        accept: which drafts stand.
    """
    cache, draft_cache = caches
    device, batch = cache.lengths.device, len(lengths)
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    scorers = [
        HeadScorer(heads, family_of(config).group(config), family_of(config).scale(config))
        for config, heads in zip(configs, (profile.target_heads, profile.draft_heads))
    ]
    with registered_baselines():
        options = DustinConfig(mode=arm.mode, sinks=SINKS, window=WINDOW)
        options = replace(options, budget=budget) if arm.sparse else options
        policy = build_policy(PolicyContext(options, profile, scorers[0], scorers[1], configs[0], configs[1]))
    # the text itself is not looked at: two columns stand for it
    limit = 2 + new_tokens
    proposer: Proposer = NoProposer(cache)
    if arm.draft_cache is not None:
        proposer = ModelProposer(
            StockForward(draft),
            draft_cache,
            shared=False,
            vocab_size=configs[0].vocab_size,
            processors=LogitsProcessorList(),
            do_sample=False,
            heads=policy.draft_heads,
            limit=limit,
            kind=arm.draft_cache,
            sinks=SINKS,
            window=WINDOW,
            size=budget - 2 * gamma if arm.draft_cache == "sparse" else budget,
            gamma=gamma,
        )
    else:
        gamma = 0
    parts = StepParts(
        forward=StockForward(target),
        cache=cache,
        proposer=proposer,
        policy=policy,
        processors=LogitsProcessorList(),
        ending=Ending(StoppingCriteriaList(), None, limit),
        accept=accept if gamma else greedy_accept,
        pad_token_id=0,
    )
    vocabulary = min(config.vocab_size for config in configs)
    state = DecodeState(
        sequences=torch.randint(3, vocabulary, (batch, limit + gamma + 1), device=device),
        first=torch.full((batch,), 2, device=device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
        limit=torch.tensor(limit, device=device),
    )
    decode = Decode(arm, parts, state, gamma, torch.tensor(lengths, device=device))
    decode.rewind()
    return decode
