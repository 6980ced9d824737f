"""Semantic retrieval heads: scores every head by the attention that answers put on the fact they repeat."""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dustin_hf.cache import DustinCache
from dustin_hf.enabling import enable
from dustin_hf.forward import input_device
from dustin_hf.held import write_file
from dustin_hf.model_patches.families import ModelFamily, family_of
from dustin_hf.prefill import prefill
from dustin_hf.profile import Heads, config_hash
from dustin_hf.profiling.needles import NeedleSample
from dustin_hf.profiling.rows import attention_rows, mass, tapped_block

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def score_heads(
    model: "PreTrainedModel",
    samples: Sequence[NeedleSample],
    progress: Callable[[int, int], None] | None = None,
    state_path: str | Path | None = None,
) -> torch.Tensor:
    """Share of its attention that each head puts on the fact while the model is made to repeat it.

    Of every sample the prompt is prefilled and the answer is run as one block. The queries that count are those that
    predict a token of the answer: of the prompt's last token and of the answer's but its last. Their mass on the whole
    span of the fact is averaged over them, then over samples. Source: paper section 4.2.1, after CompressKV, which
    counts the whole span and not only the top token. The model is left as found.

    Args:
        model: target or draft.
        samples: as from `needle_samples`, for this model's tokenizer.
        progress: called with the number of samples done and of all, after each one.
        state_path: a `.safetensors` file that keeps the scores of finished samples, written after each one. A later
            call with it computes only what it lacks, and returns exactly what one call would have.

    Returns:
        `[layers, HQ]` float32 on the CPU, 0 to 1.

    Raises:
        ValueError: if there are no samples, one is longer than the model allows, or `state_path` is no state of this
            model.
        UnsupportedModelError: if the model's architecture is not supported.
    """
    config = model.config.get_text_config(decoder=True)
    family_of(config)
    limit = ModelFamily.positions(config)
    if not samples:
        raise ValueError("`samples` is empty: there is nothing to score heads by")
    longest = max(len(sample.prompt_ids) + len(sample.answer_ids) for sample in samples)
    if longest > limit:
        raise ValueError(
            f"`samples` are up to {longest} tokens long, the model's limit is {limit} positions "
            "(max_position_embeddings): build them with shorter `lengths`"
        )
    state = _State(None if state_path is None else Path(state_path), model)
    with enable(model), torch.no_grad():
        for done, sample in enumerate(samples, 1):
            if sample.digest not in state.scores:
                state.add(sample.digest, _score_sample(model, sample))
            if progress is not None:
                progress(done, len(samples))
    return torch.stack([state.scores[sample.digest] for sample in samples]).double().mean(0).float()


def best_heads(scores: torch.Tensor, count: int) -> Heads:
    """The `count` best heads of each layer, best first, from scores `[layers, HQ]`; equal ones by their number.

    Raises:
        ValueError: if a layer has not so many heads, or a score is NaN.
    """
    if scores.isnan().any():
        raise ValueError("`scores` hold NaN: the model overflows in its dtype, load it in bfloat16 or float32")
    if not 1 <= count <= scores.shape[1]:
        raise ValueError(f"`count` must be between 1 and the {scores.shape[1]} heads of a layer, got {count}")
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
    return {layer: tuple(heads) for layer, heads in enumerate(order.tolist())}


def overlap(a: Heads, b: Heads) -> float:
    """Share of (layer, head) pairs that both sets have, of the larger one; 1 for equal sets."""
    first, second = ({(layer, head) for layer, heads in x.items() for head in heads} for x in (a, b))
    return len(first & second) / max(len(first), len(second), 1)


def _score_sample(model: "PreTrainedModel", sample: NeedleSample) -> torch.Tensor:
    """Scores of one sample, `[layers, HQ]` float32 on the CPU."""
    config = model.config.get_text_config(decoder=True)
    scale = family_of(config).scale(config)
    device = input_device(model)
    prompt = torch.tensor([sample.prompt_ids], device=device)
    block = torch.tensor([(sample.prompt_ids[-1], *sample.answer_ids[:-1])], device=device)
    start = prompt.shape[1] - 1
    cache = DustinCache(config.num_hidden_layers, 1, start + block.shape[1], device)
    prefill(model, cache, prompt, [0], [0])
    _, queries = tapped_block(model, cache, block, logits_to_keep=1)
    scores = torch.empty(config.num_hidden_layers, config.num_attention_heads)
    for layer in range(config.num_hidden_layers):
        rows = attention_rows(queries[layer][0], cache.layers[layer].keys[0], start, scale)
        scores[layer] = mass(rows, *sample.span).mean(1).cpu()
    return scores


class _State:
    """Scores of finished samples by their digest, in a file where there is a path; written whole or not at all."""

    def __init__(self, path: Path | None, model: "PreTrainedModel"):
        self.path = path
        self.metadata = {"dustin_hf": "head scores 1", "model": _fingerprint(model) if path is not None else ""}
        self.scores: dict[str, torch.Tensor] = {}
        if path is not None and path.exists():
            self._load(path)

    def _load(self, path: Path) -> None:
        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                self.scores = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise ValueError(f"`state_path` {path} cannot be read ({error}): delete it or name another") from error
        for key, what in (("dustin_hf", "kind of file"), ("model", "model")):
            if metadata.get(key) != self.metadata[key]:
                raise ValueError(
                    f"`state_path` {path} belongs to another {what}: {metadata.get(key)!r}, "
                    f"expected {self.metadata[key]!r}; delete it or name another"
                )

    def add(self, digest: str, scores: torch.Tensor) -> None:
        """Keep the scores of one sample."""
        self.scores[digest] = scores
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, save(self.scores, self.metadata))


def _fingerprint(model: "PreTrainedModel") -> str:
    """Tells a model from others, fine-tunes too: hash of its shape, its dtype, and the first number of each weight."""
    first: list[Any] = [
        None if weight.is_meta or not weight.numel() else weight[(0,) * weight.ndim].item()
        for weight in model.parameters()
    ]
    content = [config_hash(model.config.get_text_config(decoder=True)), str(model.dtype), first]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
