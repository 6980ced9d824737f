"""Which model arguments of lm_eval are Dustin's, and which are the harness's; others are refused."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from dustin_hf.config import DustinConfig

# `backend` is the harness's: decoder or encoder-decoder.
DUSTIN_OPTIONS = tuple(f.name for f in fields(DustinConfig) if f.name != "backend")
# What the harness passes on to `from_pretrained` without a name of its own.
LOADING_OPTIONS = ("attn_implementation",)


def split_options(options: Mapping[str, Any], harness: Collection[str]) -> tuple[DustinConfig, dict[str, Any]]:
    """Dustin's options, checked, and those that are left for the harness.

    Args:
        options: as in `--model_args`, without the models and the profile.
        harness: names that the harness's model takes.

    Raises:
        ValueError: on names that nobody knows, or values that `DustinConfig` refuses.
    """
    left = {name: value for name, value in options.items() if name not in DUSTIN_OPTIONS}
    unknown = sorted(set(left) - set(harness) - set(LOADING_OPTIONS))
    if unknown:
        raise ValueError(
            f"`model_args` has unknown names {unknown}; besides `pretrained`, `draft` and `profile` it takes "
            f"{list(DUSTIN_OPTIONS)} for Dustin, and for the harness {sorted({*harness, *LOADING_OPTIONS})}"
        )
    return DustinConfig(**{name: options[name] for name in DUSTIN_OPTIONS if name in options}), left
