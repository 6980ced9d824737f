"""DustinGenerationMixin: how `generate` reaches the engine, and what it gives back."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from dustin_hf._compat import CACHE_ARG, CACHE_ARGS
from dustin_hf.assembly import assemble
from dustin_hf.cache import DustinCache
from dustin_hf.config import DustinConfig
from dustin_hf.engine import choose_backend, run_steps
from dustin_hf.modules import walking_once
from dustin_hf.pool import Pool
from dustin_hf.profile import DustinProfile
from dustin_hf.stats import GenerationStats, StatsRecorder
from dustin_hf.streaming import BatchStreamer
from dustin_hf.validation import check_inputs, check_mode, check_model_kwargs, check_own_inputs, check_pair

if TYPE_CHECKING:
    from typing import Any as _Model  # a PreTrainedModel that generates, once mixed in

    from transformers import GenerationConfig
else:
    _Model = object

logger = logging.get_logger(__name__)

CACHE_IMPLEMENTATION = "dustin"


@dataclass
class DustinGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: stock's fields, and the statistics of the call."""

    stats: GenerationStats | None = None


def is_requested(model: Any, generation_config: "GenerationConfig | None", kwargs: dict[str, Any]) -> bool:
    """Whether a call of `generate` asks for Dustin: by a cache of ours, by keyword, by its config, by the model's."""
    if holds_cache(kwargs):
        return True
    for value in (
        kwargs.get("cache_implementation"),
        getattr(generation_config, "cache_implementation", None),
        getattr(getattr(model, "generation_config", None), "cache_implementation", None),
    ):
        if value is not None:
            return value == CACHE_IMPLEMENTATION
    return False


def holds_cache(kwargs: dict[str, Any]) -> bool:
    """Whether a `DustinCache` is among the arguments of `generate`."""
    return any(isinstance(kwargs.get(name), DustinCache) for name in CACHE_ARGS)


class DustinGenerationMixin(_Model):
    """Takes over from `GenerationMixin` wherever a call has `cache_implementation="dustin"`, and nowhere else.

    `enable` puts it in front of a model's own class. Stock `generate` still prepares inputs, processors and criteria.
    """

    # set by `enable` on the class it makes: the class it came from, (handle, profile) of each `enable`, and what later
    # calls use again
    _dustin_original: type
    _dustin_pool: Pool
    _dustin_profiles: list[tuple[object, DustinProfile | None]]

    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        if holds_cache(kwargs):
            kwargs.setdefault("cache_implementation", CACHE_IMPLEMENTATION)
        if is_requested(self, generation_config, kwargs):
            check_inputs(inputs, kwargs)
        return super().generate(inputs, generation_config, *args, **kwargs)

    def _prepare_generation_config(self, generation_config, **kwargs):
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        # Stock has filled in its default of 20 drafts by now; remember what the user asked for.
        asked = kwargs.get("num_assistant_tokens")
        for config in (generation_config, self.generation_config):
            asked = getattr(config, "num_assistant_tokens", None) if asked is None else asked
        prepared._dustin_num_assistant_tokens = asked
        # and what of it was for the model, before stock adds its own and encodes images
        prepared._dustin_model_kwargs = [name for name, value in model_kwargs.items() if value is not None]
        return prepared, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_config.cache_implementation != CACHE_IMPLEMENTATION:
            return super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        check_mode(generation_mode, generation_config, generation_mode_kwargs)
        check_model_kwargs(generation_config._dustin_model_kwargs)
        check_pair(self, generation_mode_kwargs.get("assistant_model"))
        check_own_inputs(self)
        DustinConfig.from_cache_config(generation_config.cache_config)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if generation_config.cache_implementation != CACHE_IMPLEMENTATION:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        given = model_kwargs.get(CACHE_ARG)
        if given is not None and not isinstance(given, DustinCache):
            raise ValueError(
                f"`{CACHE_ARG}` is a {type(given).__name__}; with cache_implementation='dustin' it must be the "
                "DustinCache of an earlier call, or be left out"
            )

    @walking_once()
    def _assisted_decoding(self, input_ids, generation_config, **kwargs):
        if generation_config.cache_implementation != CACHE_IMPLEMENTATION:
            return super()._assisted_decoding(input_ids, generation_config=generation_config, **kwargs)
        streamer = kwargs.get("streamer")
        if streamer is not None and len(input_ids) > 1 and not isinstance(streamer, BatchStreamer):
            raise ValueError(
                f"a {type(streamer).__name__} takes one row, `input_ids` have {len(input_ids)}: rows of a batch grow "
                "at different speeds with 'dustin', pass a `dustin_hf.BatchStreamer`"
            )
        if self.training:
            logger.warning("The model is in training mode, where dropout changes its output: call model.eval() first.")
        call = assemble(
            self,
            # looking drafts up wins over a model, as in stock
            kwargs.get("assistant_model") if generation_config.prompt_lookup_num_tokens is None else None,
            input_ids,
            kwargs["logits_processor"],
            kwargs["stopping_criteria"],
            generation_config,
            profile=self._dustin_profiles[-1][1],
            num_assistant_tokens=generation_config._dustin_num_assistant_tokens,
            attention_mask=kwargs.get("attention_mask"),
            position_ids=kwargs.get("position_ids"),
            cache=kwargs.get(CACHE_ARG),
            pool=self._dustin_pool,
        )
        parts, state = call.parts, call.state
        backend, recorder = choose_backend(call.config.backend, parts), StatsRecorder(state.sequences.device)
        try:
            with recorder.clock.phase("prefill"):
                call.prefill()
            backend = run_steps(parts, state, call.gamma, recorder, backend, self._dustin_pool, streamer)
        except BaseException:
            call.abandon()
            raise
        call.keep()

        width = int(state.first.max())
        sequences = state.sequences[:, :width].to(input_ids.device).contiguous()
        if not generation_config.return_dict_in_generate:
            return sequences
        stats = recorder.finish(
            num_assistant_tokens=call.gamma,
            kv_bytes_per_token=call.kv_bytes_per_token,
            backend=backend.name,
            backend_reason=backend.reason,
            options=call.config.to_dict(),
            draft_cache=getattr(parts.proposer, "kind", None),
            profile=call.profile,
        )
        output: dict[str, Any] = {"sequences": sequences, "stats": stats, CACHE_ARG: parts.cache}
        for name, collector in (("scores", parts.scores), ("logits", parts.logits)):
            if collector is not None:
                output[name] = collector.finish(width)
        return DustinGenerateOutput(**output)
