"""DustinGenerationMixin: how `generate` reaches the engine, and what it gives back."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from dustin_hf._compat import CACHE_ARG
from dustin_hf.assembly import assemble
from dustin_hf.cache import DustinCache
from dustin_hf.config import DustinConfig
from dustin_hf.engine import EagerEngine
from dustin_hf.prefill import prefill
from dustin_hf.profile import DustinProfile
from dustin_hf.stats import GenerationStats, StatsRecorder
from dustin_hf.validation import check_inputs, check_mode, check_pair

if TYPE_CHECKING:
    from typing import Any as _Model  # a PreTrainedModel that generates, once mixed in

    from transformers import GenerationConfig
else:
    _Model = object

CACHE_IMPLEMENTATION = "dustin"


@dataclass
class DustinGenerateOutput(GenerateDecoderOnlyOutput):
    """What `generate` returns with `return_dict_in_generate=True`: stock's fields, and the statistics of the call."""

    stats: GenerationStats | None = None


def is_requested(model: Any, generation_config: "GenerationConfig | None", cache_implementation: str | None) -> bool:
    """Whether a call of `generate` asks for Dustin: by keyword, else by its config, else by the model's config."""
    for value in (
        cache_implementation,
        getattr(generation_config, "cache_implementation", None),
        getattr(getattr(model, "generation_config", None), "cache_implementation", None),
    ):
        if value is not None:
            return value == CACHE_IMPLEMENTATION
    return False


class DustinGenerationMixin(_Model):
    """Takes over from `GenerationMixin` wherever a call has `cache_implementation="dustin"`, and nowhere else.

    `enable` puts it in front of a model's own class. Stock `generate` still prepares inputs, processors and criteria.
    """

    # set by `enable` on the class it makes: the class it came from, and (handle, profile) of each `enable`
    _dustin_original: type
    _dustin_profiles: list[tuple[object, DustinProfile | None]]

    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        if is_requested(self, generation_config, kwargs.get("cache_implementation")):
            check_inputs(inputs, kwargs)
        return super().generate(inputs, generation_config, *args, **kwargs)

    def _prepare_generation_config(self, generation_config, **kwargs):
        prepared, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        # Stock has filled in its default of 20 drafts by now; remember what the user asked for.
        asked = kwargs.get("num_assistant_tokens")
        for config in (generation_config, self.generation_config):
            asked = getattr(config, "num_assistant_tokens", None) if asked is None else asked
        prepared._dustin_num_assistant_tokens = asked
        return prepared, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        if generation_config.cache_implementation != CACHE_IMPLEMENTATION:
            return super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        check_mode(generation_mode, generation_config, generation_mode_kwargs)
        check_pair(self, generation_mode_kwargs["assistant_model"])
        DustinConfig.from_cache_config(generation_config.cache_config)

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        given = model_kwargs.get(CACHE_ARG)
        if generation_config.cache_implementation == CACHE_IMPLEMENTATION:
            if given is not None:
                raise ValueError(
                    f"`{CACHE_ARG}` together with cache_implementation='dustin' is not supported yet: "
                    "pass the whole prompt"
                )
            return
        if isinstance(given, DustinCache):
            raise ValueError(
                f"`{CACHE_ARG}` is a DustinCache, which plain decoding cannot read, and continuing from one is not "
                "supported yet: pass the whole prompt with cache_implementation='dustin'"
            )
        return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)

    def _assisted_decoding(self, input_ids, generation_config, **kwargs):
        if generation_config.cache_implementation != CACHE_IMPLEMENTATION:
            return super()._assisted_decoding(input_ids, generation_config=generation_config, **kwargs)
        call = assemble(
            self,
            kwargs["assistant_model"],
            input_ids,
            kwargs["logits_processor"],
            kwargs["stopping_criteria"],
            generation_config,
            profile=self._dustin_profiles[-1][1],
            num_assistant_tokens=generation_config._dustin_num_assistant_tokens,
            attention_mask=kwargs.get("attention_mask"),
            position_ids=kwargs.get("position_ids"),
        )
        parts, state, width = call.parts, call.state, input_ids.shape[1]
        engine, recorder = EagerEngine(), StatsRecorder(self.device)
        with recorder.clock.phase("prefill"):
            prompts, chunk = state.sequences[:, :width], generation_config.prefill_chunk_size
            prefill(self, parts.cache, prompts, call.pads, chunk)
            if parts.proposer.cache is not parts.cache:
                draft_prompts = parts.proposer.embeddable(prompts)
                prefill(parts.proposer.model, parts.proposer.cache, draft_prompts, call.pads, chunk)
        engine.run(parts, state, call.gamma, recorder, kwargs.get("streamer"))

        sequences = state.sequences[:, : int(state.first.max())].to(input_ids.device)
        if not generation_config.return_dict_in_generate:
            return sequences
        stats = recorder.finish(
            num_assistant_tokens=call.gamma,
            kv_bytes_per_token=call.kv_bytes_per_token,
            backend=engine.name,
            options=call.config.to_dict(),
        )
        output: dict[str, Any] = {"sequences": sequences, "stats": stats, CACHE_ARG: parts.cache}
        return DustinGenerateOutput(**output)
