"""Published dimensions of the models that are measured: sizes in bytes, and configs for random weights."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@dataclass(frozen=True, slots=True)
class Shape:
    """Dimensions of a decoder.

    Args:
        name: as in `SHAPES`.
        layers, hidden, intermediate: depth, width, and width of the MLP.
        q_heads, kv_heads, head_dim: of each attention.
        vocab: rows of the embedding table, padding included.
        tied: whether the embedding table is the output matrix too.
        family: `"qwen2"` (queries, keys and values have biases) or `"llama"`.

    Raises:
        ValueError: if the heads do not fit each other or the width, or the family is unknown.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    family: str

    def __post_init__(self) -> None:
        if self.q_heads % self.kv_heads or self.q_heads * self.head_dim != self.hidden:
            raise ValueError(
                f"`q_heads` must be a multiple of `kv_heads`, and `q_heads * head_dim` the width: {self.q_heads} and "
                f"{self.kv_heads} heads of {self.head_dim}, width {self.hidden}"
            )
        if self.family not in ("qwen2", "llama"):
            raise ValueError(f"`family` must be 'qwen2' or 'llama', got {self.family!r}")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q_heads // self.kv_heads

    def kv_bytes_per_token(self, bytes: int = 2) -> int:  # noqa: A002
        """What one token holds in the cache, all layers; `bytes` per element."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes

    def weight_bytes(self, bytes: int = 2) -> int:  # noqa: A002
        """What one forward reads: layers, last norm and output matrix, `bytes` per element.

        The embedding table counts only where it is tied, as the output matrix: looking up a few rows is nothing.
        """
        kv_width = self.kv_heads * self.head_dim
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv_width
        if self.family == "qwen2":
            attention += self.hidden + 2 * kv_width
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return (self.layers * layer + self.hidden + self.vocab * self.hidden) * bytes

    def config(self, max_position_embeddings: int = 32768) -> "PreTrainedConfig":
        """A transformers config that a random model of this shape can be built from.

        Rotary frequencies are unscaled and no token ends a text: neither matters to speed, and random weights must
        not end a row.
        """
        from transformers import LlamaConfig, Qwen2Config

        options: dict[str, Any] = {
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.q_heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "max_position_embeddings": max_position_embeddings,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        theta = 1e6 if self.family == "qwen2" else 5e5
        options["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        if self.family == "qwen2":
            return Qwen2Config(**options)
        return LlamaConfig(**options, head_dim=self.head_dim, rms_norm_eps=1e-5)


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, True, "qwen2"),
        Shape("qwen2.5-1.5b", 28, 1536, 8960, 12, 2, 128, 151936, True, "qwen2"),
        Shape("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, False, "qwen2"),
        Shape("qwen2.5-14b", 48, 5120, 13824, 40, 8, 128, 152064, False, "qwen2"),
        Shape("qwen2.5-32b", 64, 5120, 27648, 40, 8, 128, 152064, False, "qwen2"),
        Shape("qwen2.5-72b", 80, 8192, 29568, 64, 8, 128, 152064, False, "qwen2"),
        Shape("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, True, "llama"),
        Shape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, False, "llama"),
        Shape("llama-3.1-70b", 80, 8192, 28672, 64, 8, 128, 128256, False, "llama"),
    )
}

# The default draft of each target.
DRAFTS = {
    "qwen2.5-1.5b": "qwen2.5-0.5b",
    "qwen2.5-7b": "qwen2.5-0.5b",
    "qwen2.5-14b": "qwen2.5-0.5b",
    "qwen2.5-32b": "qwen2.5-0.5b",
    "qwen2.5-72b": "qwen2.5-0.5b",
    "llama-3.1-8b": "llama-3.2-1b",
    "llama-3.1-70b": "llama-3.2-1b",
}


def pair_of(name: str) -> tuple[Shape, Shape]:
    """Target and default draft.

    Raises:
        ValueError: if no target of that name is known.
    """
    if name not in DRAFTS:
        raise ValueError(f"--shape must be one of {', '.join(DRAFTS)}, got {name!r}")
    return SHAPES[name], SHAPES[DRAFTS[name]]
