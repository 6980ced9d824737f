"""Runs a block of new tokens of every row through a model: the interface, and the model's own forward."""

from typing import TYPE_CHECKING, Any, Protocol

import torch

from dustin_hf._compat import CACHE_ARG
from dustin_hf.cache import DustinCache
from dustin_hf.model_patches.attention import BlockAttention

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Forward(Protocol):
    """How blocks of one model are computed."""

    @property
    def model(self) -> "PreTrainedModel":
        """Whose forward it is."""
        ...

    def __call__(
        self, cache: DustinCache, ids: torch.Tensor, attention: BlockAttention, logits_to_keep: int = 0
    ) -> torch.Tensor:
        """Write the keys and values of new tokens at `attention.start`, and say what comes after them.

        Args:
            cache: its storage is written, its lengths are not.
            ids: new tokens, `[B, L]`.
            attention: what they attend to.
            logits_to_keep: positions to return, counted from the end; 0 for all.

        Returns:
            Logits `[B, L or logits_to_keep, V]`, in the model's dtype, on the device of `ids`.
        """
        ...


class StockForward:
    """The model's own forward, hooks and all; the model has to be switched to the "dustin" attention."""

    def __init__(self, model: "PreTrainedModel"):
        self.model = model
        self.run: Any = model

    def __call__(
        self, cache: DustinCache, ids: torch.Tensor, attention: BlockAttention, logits_to_keep: int = 0
    ) -> torch.Tensor:
        positions = attention.start[:, None] + torch.arange(ids.shape[1], device=ids.device)
        device = input_device(self.model)
        with cache.writing_block(attention.start):
            out = self.run(
                input_ids=ids.to(device),
                position_ids=positions.clamp(min=0).to(device),
                # a 4D mask is taken as it is, and the "dustin" attention does not look at it
                attention_mask=ids.new_zeros(1, 1, 1, 1, dtype=torch.bool, device=device),
                use_cache=True,
                logits_to_keep=logits_to_keep,
                dustin=attention,
                **{CACHE_ARG: cache},
            )
        logits: torch.Tensor = out.logits.to(ids.device)
        return logits


class CompiledForward(StockForward):
    """The model's own forward through `torch.compile`, once for each shape of block."""

    def __init__(self, model: "PreTrainedModel"):
        super().__init__(model)
        self.run = torch.compile(model.forward, dynamic=False)


def input_device(model: "PreTrainedModel") -> torch.device:
    """Where a model takes its ids. Offloaded weights are placeholders between forwards; accelerate's hook knows."""
    embeddings = model.get_input_embeddings()
    device = getattr(getattr(embeddings, "_hf_hook", None), "execution_device", None)
    return next(embeddings.parameters()).device if device is None else torch.device(device)
