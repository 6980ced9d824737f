"""Checks that reach the user before any long work: each names the argument, what was expected, and what came."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import psutil
import torch
from transformers.generation.configuration_utils import GenerationMode

from dustin_hf._compat import CACHE_ARGS
from dustin_hf.cache import DustinCache
from dustin_hf.model_patches.families import ModelFamily, family_of
from dustin_hf.modules import parameters_of
from dustin_hf.processing import REFUSED
from dustin_hf.stopping import Ending

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
    from transformers.generation.logits_process import LogitsProcessorList

# Vocabularies of one tokenizer are padded to multiples of 128 times a tensor-parallel degree of up to 8.
MAX_VOCABULARY_PADDING = 1024

# Arguments of a model that mean the same here.
_SERVED_ARGUMENTS = (*CACHE_ARGS, "attention_mask", "input_ids", "logits_to_keep", "position_ids", "use_cache")
# Generation options that mean something Dustin does not do: option -> what to do instead.
_REFUSED_OPTIONS = {
    "output_attentions": "not supported: sparse verification has no full attention maps",
    "output_hidden_states": "not supported: the states of rejected drafts are mixed in; run the model over the output",
    "assistant_early_exit": "not supported: pass assistant_model",
    "assistant_ensemble_weight": "not supported: it changes the target's law",
    "token_healing": "not supported: it changes the end of prompts; cut them at whole words",
    "use_mtp": "not supported: pass assistant_model",
    "speculation_type": "not supported: pass assistant_model",
}


def check_inputs(inputs: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse embeddings, empty prompts and masks of another shape before stock `generate` trips over them."""
    if kwargs.get("inputs_embeds") is not None:
        raise ValueError(
            "`inputs_embeds` is not supported with cache_implementation='dustin': a draft needs token ids; "
            "pass `input_ids`"
        )
    if callable(kwargs.get("custom_generate")):
        raise ValueError(
            "`custom_generate` is a function, which decodes by itself: leave it out, or `cache_implementation='dustin'`"
        )
    ids = kwargs.get("input_ids") if inputs is None else inputs
    if ids is not None and ids.numel() == 0:
        raise ValueError(f"`input_ids` must hold at least one row of at least one token, got shape {tuple(ids.shape)}")
    mask = kwargs.get("attention_mask")
    if ids is not None and mask is not None and mask.shape != ids.shape:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids` {tuple(ids.shape)}, got {tuple(mask.shape)}; with a "
            "cache, too, both are those of the whole text"
        )


def check_mode(mode: str, generation_config: "GenerationConfig", mode_kwargs: dict[str, Any]) -> None:
    """Refuse decoding modes and outputs that are not greedy or sampled speculation with a draft."""
    for option, advice in _REFUSED_OPTIONS.items():
        if getattr(generation_config, option, None):
            raise ValueError(f"`{option}={getattr(generation_config, option)!r}` with 'dustin' is {advice}")
    if mode not in (GenerationMode.ASSISTED_GENERATION, GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"cache_implementation='dustin' decodes greedily or by sampling, but the options ask for {str(mode)!r}: "
            "leave out `num_beams` and other search options"
        )
    if mode_kwargs.get("assistant_model") is None and generation_config.prompt_lookup_num_tokens is None:
        raise ValueError(
            "`assistant_model` is needed with cache_implementation='dustin': pass a small model of the same "
            "tokenizer, or the model itself to draft over a streaming cache, or set `prompt_lookup_num_tokens`"
        )
    for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "prefill_chunk_size"):
        value = getattr(generation_config, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}")
    if generation_config.use_cache is False:
        raise ValueError("`use_cache=False` cannot be had with cache_implementation='dustin': leave it out")
    schedule = generation_config.num_assistant_tokens_schedule
    if schedule not in (None, "constant"):
        raise ValueError(
            f"`num_assistant_tokens_schedule={schedule!r}` is not supported yet with 'dustin', where rows of a batch "
            "would need schedules of their own: use 'constant'"
        )
    if mode_kwargs.get("synced_gpus"):
        raise ValueError("`synced_gpus=True` is not supported yet with 'dustin': ranks accept different amounts")
    check_tokenizers(mode_kwargs.get("tokenizer"), mode_kwargs.get("assistant_tokenizer"))


def check_model_kwargs(names: Iterable[str]) -> None:
    """Refuse what a model's own `generate` would hand on to its forward, such as pixels, and blocks here would lack."""
    more = sorted(set(names) - set(_SERVED_ARGUMENTS))
    if more:
        raise ValueError(
            f"with cache_implementation='dustin' a language model runs over `input_ids` alone, got {more} too: leave "
            "out images and whatever else the model takes"
        )


def check_own_inputs(model: "PreTrainedModel") -> None:
    """Refuse models that rewrite their inputs on every step: PEFT's learned prompts, and classes of one's own."""
    prepare = model.prepare_inputs_for_generation
    tuned = getattr(getattr(prepare, "__self__", None), "active_peft_config", None)
    if getattr(tuned, "is_prompt_learning", False) or (tuned is None and not _is_stock(prepare)):
        raise ValueError(
            "`prepare_inputs_for_generation` of the model is not that of transformers, and 'dustin' feeds blocks of "
            "token ids without it (learned prompts of PEFT, for one, would be lost): generate without 'dustin'"
        )


def _is_stock(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).partition(".")[0] == "transformers"


def check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Refuse two tokenizers that do not agree; the draft's ids are fed to the target as they are."""
    if assistant_tokenizer is None:
        return
    for name, given in (("tokenizer", tokenizer), ("assistant_tokenizer", assistant_tokenizer)):
        if not hasattr(given, "get_vocab"):
            raise ValueError(
                f"`{name}` must be a tokenizer where `assistant_tokenizer` is given, got {type(given).__name__}"
            )
    if tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
        raise ValueError(
            "`assistant_tokenizer` has another vocabulary than `tokenizer`: with cache_implementation='dustin' "
            "target and draft must share one tokenizer"
        )


def check_pair(target: "PreTrainedModel", draft: "PreTrainedModel | None") -> None:
    """Refuse models that cannot be served or do not fit together; without a draft, the target alone is looked at.

    Raises:
        UnsupportedModelError: if an architecture is not supported.
        ValueError: if a model cannot be served, or the draft belongs to another tokenizer.
    """
    for model, name in ((target, "model"), (draft, "assistant_model")):
        if model is None:
            continue
        if not hasattr(model, "config"):
            raise ValueError(f"`{name}` must be a transformers model, got {type(model).__name__}")
        config = model.config.get_text_config(decoder=True)
        family_of(config, name).check(config, name)
        if not getattr(model, "can_generate", lambda: False)():
            raise ValueError(
                f"`{name}` must be a model that can generate, got {type(model).__name__}: load it with "
                "AutoModelForCausalLM"
            )
        layers = len(model.get_decoder().layers)
        if layers != config.num_hidden_layers:
            raise ValueError(
                f"`{name}` has {layers} layers, its configuration says {config.num_hidden_layers}: set "
                f"`config.num_hidden_layers` to {layers}"
            )
    wanted, got = (
        m.config.get_text_config(decoder=True).vocab_size for m in (target, target if draft is None else draft)
    )
    if abs(wanted - got) >= MAX_VOCABULARY_PADDING:
        raise ValueError(
            f"`assistant_model` has a vocabulary of {got}, the model one of {wanted}: more than padding apart, so they "
            "do not share a tokenizer; pass a draft of the same family"
        )


def check_positions(config: "PreTrainedConfig", longest: int, name: str = "target") -> None:
    """Raise `ValueError` unless a model has positions for rows of `longest` tokens, new ones counted.

    Of a draft that only proposes nothing is asked: more positions than it was trained for cost acceptance, no more.
    """
    limit = ModelFamily.positions(config.get_text_config(decoder=True))
    if longest > limit:
        raise ValueError(
            f"contexts and new tokens make up to {longest} positions, the {name}'s limit is {limit} "
            "(max_position_embeddings, and its scaling): take shorter contexts, or fewer new tokens"
        )


def check_processors(processors: "LogitsProcessorList") -> None:
    """Refuse processors whose state follows a sequence that only grows."""
    for processor in processors:
        if isinstance(processor, REFUSED):
            raise ValueError(
                f"{type(processor).__name__} is not supported with 'dustin': it keeps state that rejected drafts would "
                "spoil; leave out `guidance_scale` or `watermarking_config`"
            )


def pads_of(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """Pads at the start of each row.

    Raises:
        ValueError: on an empty row, pads on the right, or holes.
    """
    if attention_mask is None:
        return [0] * len(input_ids)
    mask = attention_mask != 0
    pads = (~mask).sum(1)
    empty = (pads == mask.shape[1]).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(f"`attention_mask` leaves no token in rows {empty}: every prompt needs at least one")
    expected = torch.arange(mask.shape[1], device=mask.device) >= pads[:, None]
    wrong = (mask != expected).any(1).nonzero()[:, 0].tolist()
    if wrong:
        raise ValueError(
            f"`attention_mask` of rows {wrong} is not zeros followed by ones: pad on the left "
            "(padding_side='left' in the tokenizer), without holes; where none was given, pads in `input_ids` made it"
        )
    return pads.tolist()


def check_position_ids(position_ids: torch.Tensor | None, pads: list[int], width: int) -> None:
    """Refuse positions other than each row's own 0, 1, 2, ..., which is what the cache slots stand for."""
    if position_ids is None:
        return
    device = position_ids.device
    expected = torch.arange(width, device=device)[None] - torch.tensor(pads, device=device)[:, None]
    got = position_ids.expand(len(pads), -1)
    if got.shape != expected.shape or bool(((got != expected) & (expected >= 0)).any()):
        raise ValueError("`position_ids` must count each row's tokens from 0, or be left out")


def kv_bytes_per_token(config: "PreTrainedConfig", dtype: torch.dtype) -> int:
    """Bytes of keys and values of one token over all layers."""
    heads = config.num_key_value_heads
    return 2 * config.num_hidden_layers * heads * ModelFamily.head_dim(config) * dtype.itemsize


def free_bytes(*models: "PreTrainedModel") -> int | None:
    """Bytes that the models' devices can still give, together; None where that is not known."""
    free = 0
    for device in _devices(models):
        if device.type == "cuda":
            free += torch.cuda.mem_get_info(device)[0]
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        elif device.type == "cpu":
            free += psutil.virtual_memory().available
        else:
            return None
    return free


def check_capacity(needed: int, *models: "PreTrainedModel") -> None:
    """Refuse caches that the models' devices cannot hold together, before anything is allocated."""
    free, devices = free_bytes(*models), _devices(models)
    if devices and free is not None and needed > free:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"the KV caches need {needed:,} bytes, but {names} has {free:,} free: "
            "use a smaller batch, shorter prompts, or a smaller `max_new_tokens`"
        )


def _devices(models: tuple["PreTrainedModel", ...]) -> set[torch.device]:
    return {p.device for p in parameters_of(*models)} - {torch.device("meta")}


def check_cache(cache: DustinCache, config: "PreTrainedConfig", batch: int) -> None:
    """Refuse to continue from a cache of another batch or another model."""
    if cache.batch_size != batch:
        raise ValueError(
            f"the given cache has {cache.batch_size} rows, `input_ids` {batch}: select or repeat its rows first "
            "(`batch_select_indices`, `batch_repeat_interleave`)"
        )
    shape = (config.num_key_value_heads, ModelFamily.head_dim(config))
    held = {(layer.keys.shape[1], layer.keys.shape[3]) for layer in cache.layers if layer.is_initialized}
    if len(cache.layers) != config.num_hidden_layers or held - {shape}:
        raise ValueError(
            f"the given cache has {len(cache.layers)} layers of (heads, head size) {sorted(held)}, the model "
            f"{config.num_hidden_layers} of {shape}: it was made by another model; start without it"
        )


def check_criteria(ending: Ending, batch: int, pad: torch.Tensor | None) -> None:
    """Rows of a batch that end early are filled with pads, so there must be one."""
    if ending.others and batch > 1 and pad is None:
        raise ValueError("`pad_token_id` (or `eos_token_id`) is needed where stopping criteria end rows of a batch")
