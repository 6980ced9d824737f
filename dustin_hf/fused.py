"""A forward of few launches for plain Llama-like decoders: merged projections, fused kernels, residuals in place."""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.activations import ACT2FN

from dustin_hf.cache import DustinCache, ordinary_tensors
from dustin_hf.kernels.rms_norm import rms_norm
from dustin_hf.kernels.rope_append import rope_append
from dustin_hf.kernels.rope_sparse_attention import rope_sparse_attention
from dustin_hf.kernels.silu_mul import silu_mul
from dustin_hf.model_patches.attention import BlockAttention
from dustin_hf.model_patches.families import family_of
from dustin_hf.modules import has_hooks, has_patched_classes, modules_of, parameters_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Small projections of one input are bound by launches and are merged into one matrix, copied anew for every call so
# that a change of the weights is seen; larger ones gain nothing (measured: a merged 7B gate and up).
MERGE_BYTES = 52 * 2**20
_NORMS = ("input_layernorm", "post_attention_layernorm")
_OWN_MODULES = ("transformers.models.", "torch.nn.", "transformers.activations")
_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def fusion_obstacle(model: "PreTrainedModel") -> str | None:
    """Why a model cannot be run by `FusedForward`; None if it can."""
    original = getattr(type(model), "_dustin_original", type(model))
    decoder: Any = model.get_decoder()
    if not original.__module__.startswith("transformers.models."):
        return f"{original.__name__} is not a model of transformers itself"
    modules = modules_of(model)
    if any("forward" in m.__dict__ or "parametrizations" in m._modules for m in modules):
        return "modules have been changed (quantised, adapted or wrapped)"
    if has_hooks(model):
        return "modules have hooks"
    parameters = parameters_of(model)
    if any(type(p) is not nn.Parameter for p in parameters):
        return "parameters are no plain tensors"
    for layer in decoder.layers:
        linears = [getattr(part, name, None) for part in (layer.self_attn, layer.mlp) for name in _LINEARS]
        found = [linear for linear in linears if linear is not None]
        if len(found) != len(_LINEARS) or any(type(linear) is not nn.Linear for linear in found):
            return "projections are not plain linear layers"
        if any(linear.bias is not None for linear in found[3:]):
            return "projections other than queries, keys and values have a bias"
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None or type(model.get_input_embeddings()) is not nn.Embedding:
        return "embeddings are not plain"
    foreign = next((type(m) for m in modules if not type(m).__module__.startswith(_OWN_MODULES)), None)
    if foreign is not None:
        return f"{foreign.__name__} is no module of transformers or torch"
    if has_patched_classes(model):
        return "classes of modules have another forward"
    norms = [decoder.norm, *(getattr(layer, name) for layer in decoder.layers for name in _NORMS)]
    norms += [m for layer in decoder.layers for m in layer.self_attn.children() if type(m) is type(decoder.norm)]
    if not all(type(norm).__name__.endswith("RMSNorm") for norm in norms):
        return "norms are not root mean square norms"
    eps = model.config.get_text_config(decoder=True).rms_norm_eps
    if any(getattr(norm, "variance_epsilon", None) != eps for norm in norms):
        return "norms have another epsilon than the configuration"
    if any(type(layer.mlp.act_fn) is not type(ACT2FN["silu"]) for layer in decoder.layers):
        return "the activation is not silu"
    kinds = {(p.device, p.dtype) for p in parameters}
    if len(kinds) != 1 or not next(iter(kinds))[1].is_floating_point:
        return "parameters are of several devices or dtypes"
    if torch.is_autocast_enabled(next(iter(kinds))[0].type):
        return "autocast is on"
    return None


class FusedForward:
    """Runs a plain decoder with eight launches a layer. Its weights are read, never changed; see `fusion_obstacle`.

    Args:
        model: on one device.
        positions: largest number of tokens of a row.
    """

    def __init__(self, model: "PreTrainedModel", positions: int):
        # weak: what a target keeps for later calls must not keep its drafts alive
        self._model = weakref.ref(model)
        config = model.config.get_text_config(decoder=True)
        self.dim = family_of(config).head_dim(config)
        self.q_heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.norm_eps = config.rms_norm_eps
        self.tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._merged: list[dict[str, torch.Tensor]] = [{} for _ in self._layers]
        self.prepare(positions)

    @property
    def model(self) -> "PreTrainedModel":
        """The model whose forward this is."""
        model = self._model()
        assert model is not None, "the model is gone"
        return model

    @property
    def pointers(self) -> tuple[int, ...]:
        """Where the merged weights lie, which captured graphs read."""
        return tuple(weight.data_ptr() for merged in self._merged for weight in merged.values())

    @property
    def _layers(self) -> Any:
        return self.model.get_decoder().layers

    @ordinary_tensors
    @torch.no_grad()
    def prepare(self, positions: int) -> None:
        """Take the weights as they are now, and rotary tables for rows of `positions` tokens."""
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for layer, merged in zip(self._layers, self._merged):
            attention, mlp = layer.self_attn, layer.mlp
            qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
            for name, linears in (("qkv", qkv), ("gate_up", [mlp.gate_proj, mlp.up_proj])):
                weights = [linear.weight for linear in linears]
                if sum(weight.nbytes for weight in weights) <= MERGE_BYTES:
                    copies += _merge(merged, name, weights)
            if attention.q_proj.bias is not None:
                copies += _merge(merged, "bias", [linear.bias for linear in qkv])
        if copies:  # all at once: one by one their launches take longer than they do
            torch._foreach_copy_([to for to, _ in copies], [weight for _, weight in copies])
        weight: Any = self.model.get_input_embeddings().weight
        fitting = [table for table in self.tables if _alike(table[0], weight)]
        positions = max(positions, *(len(cos) for cos, _ in fitting), 0)
        rotary: Any = self.model.get_decoder().rotary_emb
        cos, sin = (x[0] for x in rotary(weight[:1, None], torch.arange(positions, device=weight.device)[None]))
        # graphs captured before go on pointing at the shorter ones
        for held_cos, held_sin in fitting:
            held_cos.copy_(cos[: len(held_cos)])
            held_sin.copy_(sin[: len(held_sin)])
        if not fitting or fitting[-1] is not self.tables[-1] or len(self.tables[-1][0]) < positions:
            self.tables.append((cos.contiguous(), sin.contiguous()))

    def __call__(
        self, cache: DustinCache, ids: torch.Tensor, attention: BlockAttention, logits_to_keep: int = 0
    ) -> torch.Tensor:
        batch, new = ids.shape
        model: Any = self.model
        decoder: Any = model.get_decoder()
        embeddings = model.get_input_embeddings().weight
        h = nn.functional.embedding(ids.flatten().to(embeddings.device), embeddings)
        for index, (layer, merged) in enumerate(zip(self._layers, self._merged)):
            x = rms_norm(h, layer.input_layernorm.weight, self.norm_eps)
            o = self._attend(index, layer.self_attn, merged, x.view(batch, new, -1), cache, attention)
            h.addmm_(o, layer.self_attn.o_proj.weight.T)
            x = rms_norm(h, layer.post_attention_layernorm.weight, self.norm_eps)
            if "gate_up" in merged:
                gate, up = (x @ merged["gate_up"].T).chunk(2, dim=-1)
            else:
                gate, up = x @ layer.mlp.gate_proj.weight.T, x @ layer.mlp.up_proj.weight.T
            h.addmm_(silu_mul(gate, up), layer.mlp.down_proj.weight.T)
        h = h.view(batch, new, -1)[:, -logits_to_keep:]
        x = rms_norm(h.reshape(-1, h.shape[-1]), decoder.norm.weight, self.norm_eps)
        logits = x @ model.get_output_embeddings().weight.T
        return logits.view(batch, -1, logits.shape[-1]).to(ids.device)

    def _attend(
        self,
        index: int,
        module: Any,
        merged: dict[str, torch.Tensor],
        x: torch.Tensor,
        cache: DustinCache,
        attention: BlockAttention,
    ) -> torch.Tensor:
        """Attention of one layer, from normalised states `[B, L, C]` to `[B * L, HQ * D]`."""
        if "qkv" in merged:
            qkv = x @ merged["qkv"].T
        else:
            qkv = torch.cat([x @ p.weight.T for p in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        qkv = qkv.view(*x.shape[:2], -1, self.dim)
        stored = cache.layers[index]
        if not stored.is_initialized:
            states = qkv[:, :, -self.kv_heads :].transpose(1, 2)
            stored.lazy_initialization(states, states)
        q_norm, k_norm = (getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm"))
        block = (qkv, merged.get("bias"), q_norm, k_norm, self.norm_eps, *self.tables[-1])
        start, indices = attention.start_on(qkv.device), attention.indices_of(index, qkv.device)
        if indices is not None and index not in attention.heads:  # else the queries are needed by themselves
            o = rope_sparse_attention(*block, start, stored.keys, stored.values, indices, module.scaling)
        else:
            rope_append(*block, start, stored.keys, stored.values)
            q = qkv[:, :, : self.q_heads].transpose(1, 2)
            o = attention(index, q, stored.keys, stored.values, module.scaling)
        return o.flatten(2).flatten(0, 1)


def _merge(
    merged: dict[str, torch.Tensor], name: str, parts: list[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Make room for matrices below each other: where they were the last time, so that graphs see it.

    Returns:
        What is to be copied: where to, and the matrix.
    """
    rows = [len(part) for part in parts]
    if name not in merged or not _alike(merged[name], parts[0]):
        merged[name] = parts[0].new_empty(sum(rows), *parts[0].shape[1:])
    return list(zip(merged[name].split(rows), parts))


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether both are of one dtype on one device: a model may have been moved since."""
    return a.dtype == b.dtype and a.device == b.device
