"""The attention function registered, "dustin": blocks of drafts, prompts, and else exactly sdpa; who switches to it."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend
from torch.nn.attention.bias import causal_lower_right
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from dustin_hf.kernels.full_attention import full_attention
from dustin_hf.kernels.sparse_attention import sparse_attention
from dustin_hf.modules import modules_of
from dustin_hf.profile import Heads
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "dustin"
# From so many queries on cuDNN's kernel, where SDPA prefers it, is worth the plan that it makes for each new shape
# (about 30 ms); shorter chunks take the flash kernel, which needs none.
LONG = 4096


@dataclass
class BlockAttention:
    """One block's attention, handed through `model.forward` as the keyword argument `dustin`.

    Args:
        start: tokens in the cache before the block, `[B]`.
        selection: slots that the block attends to.
        heads: layer -> query heads whose queries the caller wants back.

    Attributes:
        queries: layer -> `[B, L, NH, D]`, filled during the forward (the query tap).
        read: slots that each layer has chosen by itself, `[B]`, mean over heads (`Selection.choose`).
    """

    start: torch.Tensor
    selection: Selection
    heads: Heads
    queries: Queries = field(default_factory=dict)
    read: list[torch.Tensor] = field(default_factory=list)
    _there: dict[torch.device, tuple[torch.Tensor, torch.Tensor | None]] = field(default_factory=dict, init=False)

    def _on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`start` and the index sets on the device of a layer, copied there once per block."""
        if device not in self._there:
            indices = self.selection.indices
            self._there[device] = self.start.to(device), None if indices is None else indices.to(device)
        return self._there[device]

    def __call__(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attend with `query [B, HQ, L, D]` over storage `[B, H, T, D]`; returns `[B, L, HQ, D]`."""
        q = query.transpose(1, 2)
        if layer in self.heads:
            # selects, not a list index: that would copy the list to the device in every block
            self.queries[layer] = torch.stack([q[:, :, head] for head in self.heads[layer]], dim=2)
        start = self.start_on(q.device)
        indices = self.indices_of(layer, q.device)
        if self.selection.choose is not None:
            indices = self.selection.choose(layer, q, keys, start)
            read = start.float() if indices is None else (indices >= 0).sum(-1).float().mean(-1)
            self.read.append(read.to(self.start.device))
        if indices is None:
            return full_attention(q, keys, values, start, scale)[0]
        return sparse_attention(q, keys, values, indices, start, scale)[0]

    def start_on(self, device: torch.device) -> torch.Tensor:
        """`start` on the device of a layer."""
        return self._on(device)[0]

    def indices_of(self, layer: int, device: torch.device) -> torch.Tensor | None:
        """The slots of one layer, `[B, 1 or H, k]`; None for all, or if the layer chooses them by itself."""
        indices, sets = self._on(device)[1], self.selection.layer_sets
        return None if indices is None else indices[0 if sets is None else sets[layer]]


def dustin_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dustin: BlockAttention | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of a block; in a prefill of this thread that of a chunk of some rows' prompts; else exactly `sdpa`.

    So other calls may run beside a Dustin one: a model's configuration, which names this function then, is everybody's.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dustin is not None:
        return dustin(module.layer_idx, query, key, value, scale), None
    if _this_thread.prefills:
        return chunk_attention(query, key, value, scale).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def dustin_mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """The mask function: sdpa's, but none in a prefill of this thread, where `chunk_attention` knows what is seen."""
    return None if _this_thread.prefills else sdpa_mask(*args, **kwargs)


def chunk_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last tokens of a context, on CUDA without a mask and without copies of keys and values.

    SDPA aligns `is_causal` at the first key, so that for later chunks transformers builds a mask, with which SDPA
    leaves its fast kernels. They can do without one:

    - The flash kernel aligns `is_causal` at the last key (as `torch.nn.attention.bias` relies on), and groups heads.
    - cuDNN's kernel is faster on Hopper and later, where SDPA prefers it (torch 2.11 and newer, so stock prefill gets
      it), but aligns at the first key. So it attends to the earlier tokens and to the chunk itself apart, and both are
      merged by their log-sum-exps, which is exact.

    Where neither runs (float32, older devices), `causal_lower_right` finds the memory-efficient kernel, which knows no
    groups of heads, or as a last resort makes a boolean mask `[L, T]`. So it does on the CPU, whose flash kernel takes
    masks and groups.

    Args:
        query: `[B, HQ, L, D]`.
        key: `[B, H, T, D]`, `T >= L`; may be a slice of a cache's storage.
        value: like `key`.
        scale: of the scores.

    Returns:
        `[B, HQ, L, D]`.
    """
    new, start = query.shape[2], key.shape[2] - query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    # a head dimension that is no multiple of 8 would need padding, which `causal_lower_right` knows how to do
    if query.is_cuda and query.shape[3] % 8 == 0:
        if can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, grouped)):
            if new >= LONG and start == 0:
                return sdpa(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
            if new >= LONG and start >= LONG and _prefers_cudnn(query, key[:, :, :start], value[:, :, :start], scale):
                return _in_two_parts(query, key, value, scale)
            return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, scale=scale)[0]
    if query.is_cuda and grouped:
        # without this SDPA would take its plain implementation, with all scores at once
        key, value = (repeat_kv(x, query.shape[1] // key.shape[1]) for x in (key, value))
        grouped = False
    if start == 0:
        return sdpa(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return sdpa(query, key, value, attn_mask=causal_lower_right(new, start + new), scale=scale, enable_gqa=grouped)


def _prefers_cudnn(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> bool:
    """Whether SDPA would take cuDNN's kernel for these: its own rules, and what the user has switched off."""
    choice = torch._fused_sdp_choice(query, key, value, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return choice == SDPBackend.CUDNN_ATTENTION.value


def _in_two_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """`chunk_attention` by cuDNN: over the tokens before the chunk, and over the chunk itself, causally."""
    start = key.shape[2] - query.shape[2]
    (past, past_lse), (own, own_lse) = [
        torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key[:, :, part], value[:, :, part], None, True, 0.0, causal, scale=scale
        )[:2]
        for part, causal in ((slice(start), False), (slice(start, None), True))
    ]
    return merge(past, past_lse, own, own_lse)


def merge(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> torch.Tensor:
    """Attention over two sets of keys from that over each, `[B, HQ, L, D]`, and the log-sum-exps of their scores.

    The shares are rounded to the states' dtype, as the kernels do with probabilities: so it is one pass over them.
    """
    share = torch.sigmoid(b_lse - a_lse).reshape(*a.shape[:3], 1)
    return torch.lerp(a, b, share.to(a.dtype))


class _ThisThread(threading.local):
    prefills = 0  # how many prefills it is in


_this_thread = _ThisThread()


@contextmanager
def block_attention(*models: "PreTrainedModel") -> Iterator[None]:
    """Switch models to the "dustin" attention function, and back to what the user chose whatever happens."""
    with _switched(models):
        yield


@contextmanager
def prefill_attention(model: "PreTrainedModel") -> Iterator[None]:
    """Attend to chunks without masks: switch a model from sdpa, and back; other choices of the user stand.

    Flash attention needs neither: transformers gives it no mask for rows without pads, and it aligns at the last key.
    """
    # "dustin" is sdpa as well where nothing else is asked for
    with _switched([model], instead_of=("sdpa", ATTENTION_NAME)):
        _this_thread.prefills += 1
        try:
            yield
        finally:
            _this_thread.prefills -= 1


@dataclass
class _Switch:
    config: Any
    chosen: str
    users: int = 0


_lock = threading.Lock()
_switches: dict[int, _Switch] = {}


@contextmanager
def _switched(models: Iterable["PreTrainedModel"], instead_of: tuple[str, ...] | None = None) -> Iterator[None]:
    """Switch models to "dustin", those of them whose own is in `instead_of`; the last one out switches back."""
    modules = [module for model in models for module in modules_of(model) if "layer_idx" in module.__dict__]
    configs: dict[int, Any] = {id(module.config): module.config for module in modules}
    taken: list[_Switch] = []
    try:
        with _lock:
            for key, config in configs.items():
                switch = _switches.get(key) or _Switch(config, config._attn_implementation)
                if instead_of is None or switch.chosen in instead_of:
                    _switches[key] = switch
                    switch.users += 1
                    taken.append(switch)
                    config._attn_implementation = ATTENTION_NAME
        yield
    finally:
        with _lock:
            for switch in taken:
                switch.users -= 1
                if not switch.users:
                    switch.config._attn_implementation = switch.chosen
                    del _switches[id(switch.config)]
