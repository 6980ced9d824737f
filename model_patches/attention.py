"""The attention function registered as "dustin": draft and verify blocks over a DustinCache, plain SDPA otherwise."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from dustin_hf.kernels.full_attention import full_attention
from dustin_hf.kernels.sparse_attention import sparse_attention
from dustin_hf.profile import Heads
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION_NAME = "dustin"


@dataclass
class BlockAttention:
    """One block's attention, handed through `model.forward` as the keyword argument `dustin`.

    Args:
        start: tokens in the cache before the block, `[B]`.
        selection: slots that the block attends to.
        heads: layer -> query heads whose queries the caller wants back.

    Attributes:
        queries: layer -> `[B, L, NH, D]`, filled during the forward (the query tap).
    """

    start: torch.Tensor
    selection: Selection
    heads: Heads
    queries: Queries = field(default_factory=dict)
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
        start, indices = self._on(q.device)
        if indices is None:
            return full_attention(q, keys, values, start, scale)[0]
        sets = self.selection.layer_sets
        return sparse_attention(q, keys, values, indices[0 if sets is None else sets[layer]], start, scale)[0]


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
    """The attention function of a Dustin block; without a block, exactly `sdpa` (its mask function is sdpa's too)."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if dustin is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scale, **kwargs)
    return dustin(module.layer_idx, query, key, value, scale), None


@contextmanager
def block_attention(*models: "PreTrainedModel") -> Iterator[None]:
    """Switch models to the "dustin" attention function, and back to what the user chose whatever happens."""
    with ExitStack() as stack:
        for model in models:
            configs: dict[int, Any] = {id(m.config): m.config for m in model.modules() if hasattr(m, "layer_idx")}
            for config in configs.values():
                stack.callback(setattr, config, "_attn_implementation", config._attn_implementation)
                config._attn_implementation = ATTENTION_NAME
        yield
