"""Mistral: one window for all layers, in the config's `sliding_window`."""

from typing import TYPE_CHECKING

from dustin_hf.model_patches.families import ModelFamily

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class MistralFamily(ModelFamily):
    """Served where the window is off, as in the releases since 0.2."""

    def sliding_layers(self, config: "PreTrainedConfig") -> list[int]:
        return [] if config.sliding_window is None else list(range(config.num_hidden_layers))


MISTRAL = MistralFamily("mistral")
