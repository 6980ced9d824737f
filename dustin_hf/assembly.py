"""From the arguments of one call to everything its steps need: options, caches, policy, proposer, state."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from dustin_hf.cache import DustinCache
from dustin_hf.config import DEFAULT_NUM_ASSISTANT_TOKENS, DustinConfig, check_num_assistant_tokens
from dustin_hf.drafting import ModelProposer
from dustin_hf.model_patches.families import family_of
from dustin_hf.processing import for_drafts
from dustin_hf.profile import DustinProfile, Heads
from dustin_hf.scoring import HeadScorer
from dustin_hf.selection import PolicyContext, build_policy
from dustin_hf.step import DecodeState, StepParts
from dustin_hf.stopping import Ending
from dustin_hf.validation import check_capacity, check_position_ids, check_processors, kv_bytes_per_token, pads_of

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers.generation.logits_process import LogitsProcessorList
    from transformers.generation.stopping_criteria import StoppingCriteriaList

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class Call:
    """One call of `generate`, ready for prefill.

    Args:
        parts: what its steps share.
        state: where its rows stand.
        pads: pads at the start of each prompt.
        gamma: most tokens drafted in a step.
        config: the options.
        kv_bytes_per_token: of the target.
    """

    parts: StepParts
    state: DecodeState
    pads: list[int]
    gamma: int
    config: DustinConfig
    kv_bytes_per_token: int


def assemble(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    input_ids: torch.Tensor,
    logits_processor: "LogitsProcessorList",
    stopping_criteria: "StoppingCriteriaList",
    generation_config: "GenerationConfig",
    *,
    profile: DustinProfile | None,
    num_assistant_tokens: int | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
) -> Call:
    """Check the inputs, resolve the options, allocate.

    Args:
        target: the model that `generate` was called on.
        draft: a model of the same tokenizer, or the target itself.
        input_ids: left-padded prompts, `[B, W]`.
        logits_processor: as stock `generate` prepares it.
        stopping_criteria: as stock `generate` prepares it.
        generation_config: as stock `generate` prepares it.
        profile: of the pair; None for the default.
        num_assistant_tokens: gamma as given to `generate`, if it was.
        attention_mask: `[B, W]`, 0 on pads; None where there are none.
        position_ids: accepted only if they count each row from 0.

    Raises:
        ValueError: on inputs that cannot be served, before anything is allocated.
    """
    check_processors(logits_processor)
    pads = pads_of(input_ids, attention_mask)
    check_position_ids(position_ids, pads, input_ids.shape[1])
    config = DustinConfig.from_cache_config(generation_config.cache_config)
    target_config, draft_config = (m.config.get_text_config(decoder=True) for m in (target, draft))
    if profile is None:
        logger.warning_once(  # type: ignore[attr-defined]  # transformers adds it
            "No Dustin profile was given: an untuned default estimates attention. Use "
            "dustin_hf.enable(model, profile=...) with one made for this pair."
        )
        profile = DustinProfile.default(target_config, draft_config)
    profile.check_pair(target_config, draft_config)
    gamma = _resolve_gamma(num_assistant_tokens, config, profile, draft)

    device, (batch, width), limit = target.device, input_ids.shape, generation_config.max_length
    capacity = limit - min(pads) + gamma + 1
    own_cache = draft is not target
    per_token = kv_bytes_per_token(target_config, target.dtype)
    draft_per_token = kv_bytes_per_token(draft_config, draft.dtype) if own_cache else 0
    check_capacity((per_token + draft_per_token) * batch * capacity, device)

    cache = DustinCache(target_config.num_hidden_layers, batch, capacity, device)
    target_scorer = _head_scorer(target_config, profile.target_heads)
    draft_scorer = _head_scorer(draft_config, profile.draft_heads)
    policy = build_policy(PolicyContext(config, profile, target_scorer, draft_scorer))
    streams = config.draft_cache == "streaming" or (config.draft_cache == "auto" and not own_cache)
    proposer = ModelProposer(
        draft,
        DustinCache(draft_config.num_hidden_layers, batch, capacity, device) if own_cache else cache,
        shared=not own_cache,
        vocab_size=target_config.vocab_size,
        processors=for_drafts(logits_processor),
        do_sample=generation_config.do_sample,
        heads=policy.draft_heads,
        limit=limit,
        sinks=config.sinks,
        streaming=config.budget if streams and config.budget < capacity else 0,
    )
    pad = generation_config._pad_token_tensor
    parts = StepParts(
        target=target,
        cache=cache,
        proposer=proposer,
        policy=policy,
        processors=logits_processor,
        ending=Ending(stopping_criteria, generation_config._eos_token_tensor, limit),
        do_sample=generation_config.do_sample,
        pad_token_id=0 if pad is None else int(pad),
    )
    sequences = input_ids.new_full((batch, limit + gamma + 1), parts.pad_token_id, device=device)
    sequences[:, :width] = input_ids
    state = DecodeState(
        sequences,
        first=torch.full((batch,), width, device=device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
    )
    return Call(parts, state, pads, gamma, config, per_token)


def _head_scorer(config: "PreTrainedConfig", heads: Heads) -> HeadScorer:
    family = family_of(config)
    return HeadScorer(heads, family.group(config), family.scale(config))


def _resolve_gamma(given: int | None, config: DustinConfig, profile: DustinProfile, draft: "PreTrainedModel") -> int:
    """As given to `generate`, else in `cache_config`, else the profile's, else the assistant's, else 4."""
    own = getattr(getattr(draft, "generation_config", None), "num_assistant_tokens", None)
    for value in (given, config.num_assistant_tokens, profile.num_assistant_tokens, own):
        check_num_assistant_tokens(value)
        if value is not None:
            return value
    return DEFAULT_NUM_ASSISTANT_TOKENS
