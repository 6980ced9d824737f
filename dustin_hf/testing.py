"""Tiny models, padded batches and tensor comparison: for this project's tests, and for authors of policies."""

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

# Largest relative RMS error that an op may show against its float32 reference.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def assert_close(name: str, expected: torch.Tensor, got: torch.Tensor, tolerance: float | None = None) -> None:
    """Fail unless RMS(got - expected) / RMS(expected) is within the tolerance of `got`'s dtype.

    Args:
        name: what is compared, for the message and the log.
        expected: the reference.
        got: of the same shape.
        tolerance: instead of `TOLERANCE[got.dtype]`; only for quantities the table does not speak of.

    Raises:
        AssertionError: on another shape, a NaN on either side, or too large an error.
    """
    if expected.shape != got.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    if expected.isnan().any() or got.isnan().any():
        raise AssertionError(f"{name}: NaN in {'expected' if expected.isnan().any() else 'got'}")
    limit = TOLERANCE[got.dtype] if tolerance is None else tolerance
    reference = expected.double()
    error = (got.double() - reference).square().mean().sqrt() / reference.square().mean().sqrt().clamp(min=1e-12)
    logger.info("%s: relative RMS error %.2e (limit %.0e)", name, error, limit)
    if error > limit:
        raise AssertionError(f"{name}: relative RMS error {error:.2e} above {limit:.0e}")


def tiny_model(family: str = "qwen2", seed: int = 0, **overrides: Any) -> "PreTrainedModel":
    """A random causal language model small enough for any test, in eval mode and float32.

    Args:
        family: `"llama"`, `"mistral"`, `"qwen2"` or `"qwen3"`.
        seed: of its weights; the global generator is left as it was.
        overrides: fields of its config. The default spread of weights (0.2) keeps scores far from ties.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {
        "vocab_size": 160,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
        **overrides,
    }
    if family == "mistral":
        options.setdefault("sliding_window", None)
    if family == "qwen3":
        options.setdefault("head_dim", options["hidden_size"] // options["num_attention_heads"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options)).eval()


def noisy_copy(model: "PreTrainedModel", noise: float, seed: int = 0) -> "PreTrainedModel":
    """A draft that agrees with `model` in part: a copy with normal noise on its language-modelling head."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    weight = draft.lm_head.weight
    with torch.no_grad():
        weight += noise * torch.randn(weight.shape, generator=generator)
    return draft


def left_pad(prompts: list[list[int]], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[B, W]` of prompts of unequal length."""
    width = max(map(len, prompts))
    return {
        "input_ids": torch.tensor([[pad_token_id] * (width - len(p)) + p for p in prompts]),
        "attention_mask": torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts]),
    }


def random_prompts(lengths: list[int], seed: int = 0, low: int = 3, high: int = 160) -> list[list[int]]:
    """One prompt of random ids in `low .. high - 1` for each length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(low, high, (n,), generator=generator).tolist() for n in lengths]
