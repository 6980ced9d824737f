"""lm_eval's Hugging Face model, whose answers are generated through Dustin."""

import inspect
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import get_dtype
from transformers import AutoModelForCausalLM, StoppingCriteriaList

from dustin_hf.enabling import enable
from dustin_hf.eval.baselines import register_baselines
from dustin_hf.eval.harness.options import LOADING_OPTIONS, split_options
from dustin_hf.eval.harness.stopping import StopTexts
from dustin_hf.generation import CACHE_IMPLEMENTATION
from dustin_hf.profile import DustinProfile
from dustin_hf.validation import check_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@register_model("dustin")
class DustinLM(HFLM):
    """`--model hf`, except that `generate_until` decodes with sparse verification.

    `loglikelihood` and `loglikelihood_rolling` are the harness's own: one dense forward over the full cache, which no
    option of Dustin's changes.

    Args:
        pretrained: the target, a folder, Hub id or model.
        draft: the drafting model, likewise; the target itself drafts over a streaming cache. Loaded in the target's
            dtype option, on its device.
        profile: of the pair, or a folder, file or Hub id of one. Default: as `enable`.
        options: fields of `DustinConfig` but `backend`, and what `HFLM` takes by name.

    Raises:
        ValueError: on an option that is unknown, missing or out of range, before the target is loaded; on models that
            do not belong together.
    """

    def __init__(
        self,
        pretrained: "str | PreTrainedModel",
        draft: "str | PreTrainedModel | None" = None,
        profile: DustinProfile | str | None = None,
        **options: Any,
    ):
        register_baselines()
        names = [p.name for p in inspect.signature(HFLM).parameters.values() if p.kind is not p.VAR_KEYWORD]
        self.dustin_config, left = split_options(options, names)
        if draft is None:
            raise ValueError(
                "`draft` is needed in `model_args`: a small model of the target's tokenizer, or the same as "
                "`pretrained` to let the target draft for itself"
            )
        if isinstance(profile, str):
            profile = _profile(profile)
        super().__init__(pretrained, **left)
        self.draft = self.model if draft == pretrained else self._load_draft(draft, left)
        # what the first batch would find, before a task is downloaded and its requests are built
        check_pair(self.model, self.draft)
        if profile is not None:
            profile.check_pair(self.model.config, self.draft.config)
        enable(self.model, profile=profile)

    def _load_draft(self, draft: "str | PreTrainedModel", options: dict[str, Any]) -> "PreTrainedModel":
        if not isinstance(draft, str):
            return draft
        loading = {name: options[name] for name in LOADING_OPTIONS if name in options}
        dtype, device = get_dtype(options.get("dtype", "auto")), str(self.device)
        try:
            return AutoModelForCausalLM.from_pretrained(draft, dtype=dtype, device_map={"": device}, **loading)
        except OSError as error:
            raise ValueError(f"`draft` {draft!r} cannot be loaded: {str(error).splitlines()[0]}") from error

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """Continue left-padded prompts; as `HFLM` does, but for the draft, the cache and the stop strings."""
        if not generation_kwargs.get("do_sample"):
            generation_kwargs.pop("temperature", None)  # 0: the harness's word for greedy
        criteria = StoppingCriteriaList([StopTexts(self.tokenizer, stop, context.shape[1])])
        mixed = self.mixed_precision_dtype
        with torch.autocast(device_type=self.device.type, dtype=mixed, enabled=mixed is not None):
            return self.model.generate(
                input_ids=context,
                max_length=max_length,
                stopping_criteria=criteria,
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
                assistant_model=self.draft,
                cache_implementation=CACHE_IMPLEMENTATION,
                cache_config=self.dustin_config.to_dict(),
                **generation_kwargs,
            )


def _profile(name: str) -> DustinProfile:
    """The profile of that name, with an error that names the option."""
    try:
        return DustinProfile.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"`profile` {name!r} cannot be read: {str(error).splitlines()[0]}") from error
