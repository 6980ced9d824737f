"""From the arguments of one call to everything its steps need: options, caches, policy, proposer, state."""

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers.utils import logging

from dustin_hf.acceptance import greedy_accept, sampling_accept
from dustin_hf.cache import DustinCache
from dustin_hf.collecting import ColumnCollector
from dustin_hf.config import DEFAULT_NUM_ASSISTANT_TOKENS, DustinConfig, check_num_assistant_tokens
from dustin_hf.drafting import ModelProposer, PromptLookupProposer, Proposer
from dustin_hf.forward import StockForward, input_device
from dustin_hf.model_patches.attention import block_attention
from dustin_hf.model_patches.families import family_of
from dustin_hf.pool import Pool, rounded
from dustin_hf.prefill import held_prefixes, prefill
from dustin_hf.processing import for_drafts, prepared
from dustin_hf.profile import DustinProfile, Heads
from dustin_hf.scoring import HeadScorer
from dustin_hf.selection import PolicyContext, build_policy
from dustin_hf.step import DecodeState, StepParts
from dustin_hf.stopping import Ending
from dustin_hf.validation import (
    check_cache,
    check_capacity,
    check_criteria,
    check_position_ids,
    check_processors,
    free_bytes,
    kv_bytes_per_token,
    pads_of,
)

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
        held: tokens of each prompt that the target's cache holds already.
        draft_held: the same of the assistant's own cache.
        gamma: most tokens drafted in a step.
        config: the options.
        kv_bytes_per_token: of the target.
        prefill_chunk_size: most tokens per forward of the prefill; None for the default.
        profile: where it came from: `"given"`, `"shipped"` or `"default"`.
    """

    parts: StepParts
    state: DecodeState
    pads: list[int]
    held: list[int]
    draft_held: list[int]
    gamma: int
    config: DustinConfig
    kv_bytes_per_token: int
    prefill_chunk_size: int | None
    profile: str

    def prefill(self) -> None:
        """Fill the caches with the prompts."""
        parts, proposer, width = self.parts, self.parts.proposer, int(self.state.first[0])
        prompts = self.state.sequences[:, :width]
        prefill(parts.forward.model, parts.cache, prompts, self.pads, self.held, self.prefill_chunk_size)
        if isinstance(proposer, ModelProposer) and proposer.cache is not parts.cache:
            prompts = proposer.embeddable(prompts).to(input_device(proposer.model))
            prefill(proposer.model, proposer.cache, prompts, self.pads, self.draft_held, self.prefill_chunk_size)
        if parts.policy.prompt_tail:
            with block_attention(parts.forward.model):
                parts.policy.begin(parts.forward.model, parts.cache, self._tail(parts.policy.prompt_tail))

    def _tail(self, count: int) -> torch.Tensor:
        """The last `count` tokens that the target's cache holds, `[B, count]`; zeros where a row has fewer."""
        first, device = self.state.first, self.state.first.device
        columns = first[:, None] - 1 - count + torch.arange(count, device=device)
        tokens = self.state.sequences.gather(1, columns.clamp(min=0))
        return torch.where(columns >= torch.tensor(self.pads, device=device)[:, None], tokens, 0)

    def keep(self) -> None:
        """Leave the cache ready for a next call: with the tokens it holds, and the assistant's own beside it."""
        cache, proposer = self.parts.cache, self.parts.proposer
        sequences = self.state.sequences
        slots = torch.arange(cache.capacity, device=sequences.device)
        columns = torch.tensor(self.pads, device=sequences.device)[:, None] + slots
        cache.tokens = sequences.gather(1, columns.clamp(max=sequences.shape[1] - 1))
        if isinstance(proposer, ModelProposer) and proposer.cache is not cache:
            # while its neighbours went on, a row that had ended fed its last two tokens again and again, under views
            # that changed: what a next call finds must not depend on how often
            own = proposer.cache
            own.lengths = torch.minimum(own.lengths, (cache.lengths - 1).clamp(min=0).to(own.lengths.device))
            cache.draft, cache.draft_model = proposer.cache, weakref.ref(proposer.model)

    def abandon(self) -> None:
        """After an error: a cache that the user gave holds what of it is still true."""
        cache = self.parts.cache
        cache.lengths, cache.draft = torch.tensor(self.held, device=cache.lengths.device), None


def assemble(
    target: "PreTrainedModel",
    draft: "PreTrainedModel | None",
    input_ids: torch.Tensor,
    logits_processor: "LogitsProcessorList",
    stopping_criteria: "StoppingCriteriaList",
    generation_config: "GenerationConfig",
    *,
    profile: DustinProfile | None,
    num_assistant_tokens: int | None,
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    cache: DustinCache | None,
    pool: Pool,
) -> Call:
    """Check the inputs, resolve the options, allocate.

    Args:
        target: the model that `generate` was called on.
        draft: a model of the same tokenizer, or the target itself; None to look drafts up in the text.
        input_ids: left-padded prompts, `[B, W]`.
        logits_processor: as stock `generate` prepares it.
        stopping_criteria: as stock `generate` prepares it.
        generation_config: as stock `generate` prepares it.
        profile: of the pair; None for the one that is shipped, if any, else the default.
        num_assistant_tokens: gamma as given to `generate`, if it was.
        attention_mask: `[B, W]`, 0 on pads; None where there are none.
        position_ids: accepted only if they count each row from 0.
        cache: of an earlier call, to continue from; changed.
        pool: where storage comes from that earlier calls have left.

    Raises:
        ValueError: on inputs that cannot be served, before anything is allocated or changed.
    """
    check_processors(logits_processor)
    pads = pads_of(input_ids, attention_mask)
    check_position_ids(position_ids, pads, input_ids.shape[1])
    config = DustinConfig.from_cache_config(generation_config.cache_config)
    target_config, draft_config = (
        model.config.get_text_config(decoder=True) for model in (target, target if draft is None else draft)
    )
    source = "given" if profile is not None else "shipped"
    profile = profile or DustinProfile.shipped(target_config, draft_config)
    if profile is None:
        source = "default"
        if config.mode in ("hybrid", "target", "draft"):
            logger.warning_once(  # type: ignore[attr-defined]  # transformers adds it
                "No Dustin profile was given: an untuned default estimates attention. Use "
                "dustin_hf.enable(model, profile=...) with one made for this pair."
            )
        profile = DustinProfile.default(target_config, draft_config)
    profile.check_pair(target_config, draft_config if draft is not None else None)
    gamma = generation_config.prompt_lookup_num_tokens
    if draft is not None:
        gamma = _resolve_gamma(num_assistant_tokens, config, profile, draft)

    device, (batch, width) = input_device(target), input_ids.shape
    logits_processor = prepared(logits_processor, batch, device)
    ending = Ending.of(stopping_criteria, device, width)
    limit = ending.limit
    pad = generation_config._pad_token_tensor
    check_criteria(ending, batch, pad)
    capacity = limit - min(pads) + gamma + 1
    if device.type == "cuda":
        capacity = rounded(capacity)
    own_cache = draft is not None and draft is not target
    draft_cache = None
    if cache is not None:
        check_cache(cache, target_config, batch)
        capacity = max(capacity, cache.capacity)  # both caches have the same slots
        if own_cache and cache.draft_model is not None and cache.draft_model() is draft:
            draft_cache = cache.draft
    continued = cache is not None
    if cache is None:
        cache = pool.cache(target, batch, capacity, device)
    if own_cache and draft is not None and draft_cache is None:
        draft_cache = pool.cache(draft, batch, capacity, device)
    models = (target,) if draft is None else (target, draft)
    per_token = kv_bytes_per_token(target_config, target.dtype)
    needed = _missing(cache, capacity) * per_token
    if draft is not None and draft_cache is not None:
        needed += _missing(draft_cache, capacity) * kv_bytes_per_token(draft_config, draft.dtype)
    if needed:
        if pool.idle_bytes and needed > (free_bytes(*models) or needed):
            pool.make_room()
        check_capacity(needed, *models)

    pad_token_id = 0 if pad is None else int(pad)
    sequences = torch.full((batch, limit + gamma + 1), pad_token_id, device=device)
    sequences[:, :width] = input_ids
    held, draft_held = [0] * batch, [0] * batch
    if continued:
        held = held_prefixes(cache, sequences[:, :width], pads)
        cache.grow(capacity)
        if cache.draft is not None:
            # also when another draft is used now: the tokens behind are about to change
            cache.draft.lengths = cache.draft.lengths.clamp(max=torch.tensor(held, device=cache.draft.lengths.device))
    if draft_cache is not None:
        draft_held = draft_cache.lengths.tolist() if continued else draft_held
        draft_cache.grow(capacity)

    target_scorer = _head_scorer(target_config, profile.target_heads)
    draft_scorer = _head_scorer(draft_config, profile.draft_heads)
    policy = build_policy(PolicyContext(config, profile, target_scorer, draft_scorer, target_config, draft_config))
    wants = generation_config.return_dict_in_generate
    parts = StepParts(
        forward=StockForward(target),
        cache=cache,
        proposer=_proposer(
            draft,
            cache,
            draft_cache,
            policy.draft_heads,
            config,
            generation_config,
            logits_processor,
            target_config.vocab_size,
            gamma,
            limit,
        ),
        policy=policy,
        processors=logits_processor,
        ending=ending,
        accept=sampling_accept if generation_config.do_sample else greedy_accept,
        pad_token_id=pad_token_id,
        scores=ColumnCollector(width, limit) if wants and generation_config.output_scores else None,
        logits=ColumnCollector(width, limit) if wants and generation_config.output_logits else None,
    )
    state = DecodeState(
        sequences,
        first=torch.full((batch,), width, device=device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
        limit=torch.tensor(limit, device=device),
    )
    chunk = generation_config.prefill_chunk_size
    return Call(parts, state, pads, held, draft_held, gamma, config, per_token, chunk, source)


def _proposer(
    draft: "PreTrainedModel | None",
    cache: DustinCache,
    draft_cache: DustinCache | None,
    heads: Heads,
    config: DustinConfig,
    generation_config: "GenerationConfig",
    processors: "LogitsProcessorList",
    vocab_size: int,
    gamma: int,
    limit: int,
) -> Proposer:
    """Prompt lookup without a draft; else the draft, over `draft_cache` or, without one, the target's `cache`."""
    do_sample = generation_config.do_sample
    if draft is None:
        max_ngram = generation_config.max_matching_ngram_size or 2
        return PromptLookupProposer(cache, vocab_size=vocab_size, do_sample=do_sample, max_ngram=max_ngram)
    shared = draft_cache is None
    kind, size = config.draft_cache, config.budget
    if kind == "sparse" and not heads:
        raise ValueError(
            "`draft_cache='sparse'` follows the draft's scores, which this policy does not make: use mode 'hybrid' or "
            "'draft' with a `draft_share` above 0, or another draft cache"
        )
    if kind == "auto":
        kind = "streaming" if shared else "sparse" if heads else "full"
    if kind == "sparse":  # what comes after the choice fills the budget: whole tiles for the kernels
        size = max(config.sinks + config.window + 1, size - 2 * gamma)
    return ModelProposer(
        StockForward(draft),
        cache if draft_cache is None else draft_cache,
        shared=shared,
        vocab_size=vocab_size,
        processors=for_drafts(processors),
        do_sample=do_sample,
        heads=heads,
        limit=limit,
        kind=kind if config.budget < cache.capacity else "full",
        sinks=config.sinks,
        window=config.window,
        size=size,
        gamma=gamma,
    )


def _missing(cache: DustinCache, capacity: int) -> int:
    """Slots of all rows that have to be allocated still."""
    have = cache.capacity if cache.layers[0].is_initialized else 0
    return cache.batch_size * max(0, capacity - have)


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
