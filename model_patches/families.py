"""The architectures that Dustin supports, and what each of them has to satisfy."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Frequencies of these change with the length of the sequence, so keys in the cache would go stale.
DYNAMIC_ROPE = ("dynamic", "longrope")


class UnsupportedModelError(NotImplementedError):
    """The model's architecture is not supported; the message lists those that are."""


@dataclass(frozen=True)
class ModelFamily:
    """A decoder whose attention modules carry `layer_idx`, write the cache themselves and take keyword arguments.

    Args:
        model_type: as in the model's config.
    """

    model_type: str

    def check(self, config: "PreTrainedConfig", name: str) -> None:
        """Raise `ValueError` where this model of the family cannot be served.

        Args:
            config: the decoder's config.
            name: how the caller calls the model: `model` or `assistant_model`.
        """
        rope = getattr(config, "rope_parameters", None) or {}
        if rope.get("rope_type") in DYNAMIC_ROPE:
            raise ValueError(
                f"`{name}` uses rope_type {rope['rope_type']!r}, whose frequencies change with the length; "
                f"expected a fixed one such as 'default', 'linear', 'yarn' or 'llama3'"
            )
        sliding = self.sliding_layers(config)
        if sliding:
            raise ValueError(
                f"`{name}` has sliding-window attention in layers {sliding}; every layer must be full attention: "
                "switch the window off in its config if it was trained to work so"
            )

    def sliding_layers(self, config: "PreTrainedConfig") -> list[int]:
        """Layers whose attention window is active."""
        kinds = getattr(config, "layer_types", None) or []
        return [i for i, kind in enumerate(kinds) if kind != "full_attention"]

    @staticmethod
    def group(config: "PreTrainedConfig") -> int:
        """Query heads per key/value head."""
        return config.num_attention_heads // config.num_key_value_heads

    @staticmethod
    def head_dim(config: "PreTrainedConfig") -> int:
        """Size of a head."""
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @staticmethod
    def positions(config: "PreTrainedConfig") -> int:
        """Tokens that a row may have: `max_position_embeddings`, or what scaling (YaRN) makes of those trained on."""
        rope = getattr(config, "rope_parameters", None) or {}
        trained, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        return max(config.max_position_embeddings, int(trained * factor) if trained and factor else 0)

    def scale(self, config: "PreTrainedConfig") -> float:
        """Factor of the attention scores."""
        return self.head_dim(config) ** -0.5


def family_of(config: "PreTrainedConfig", name: str = "model") -> ModelFamily:
    """The family of a model, by its config's `model_type`.

    Raises:
        UnsupportedModelError: if there is none.
    """
    from dustin_hf.model_patches.llama import LLAMA
    from dustin_hf.model_patches.mistral import MISTRAL
    from dustin_hf.model_patches.qwen2 import QWEN2
    from dustin_hf.model_patches.qwen3 import QWEN3

    families = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
    if config.is_encoder_decoder or config.model_type not in families:
        raise UnsupportedModelError(
            f"`{name}` has model_type {config.model_type!r}; dustin_hf supports the decoders {sorted(families)}"
        )
    return families[config.model_type]
