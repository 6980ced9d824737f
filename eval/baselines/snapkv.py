"""SnapKV: slots of the prompt by what its last tokens attend to, fixed during decoding."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.drafting import recent_slots
from dustin_hf.model_patches.families import family_of
from dustin_hf.profiling.rows import attention_rows, tapped_block
from dustin_hf.selection import Selection, SelectionPolicy, Signals

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class SnapKVPolicy(SelectionPolicy):
    """Prompt slots by the attention of the prompt's last tokens (SnapKV, arXiv:2404.14469).

    Per layer and key/value head: the attention of the last `window` tokens on those before them is averaged over these
    queries and the heads of a group, smoothed over `kernel` neighbouring slots by a maximum, and the best
    `k - window` slots are kept together with the window. Both stay as they are; all new tokens are read on top, as in
    the original. The group mean is ours: the original keeps a set for each query head.

    Args:
        k: slots of the prompt in all.
        window: last tokens of the prompt, which observe.
        kernel: slots that one is smoothed over, odd.
    """

    def __init__(self, k: int, window: int = 32, kernel: int = 7):
        if k <= window:
            raise ValueError(f"`budget` must be above the {window} tokens that observe for SnapKV, got {k}")
        self.k, self.prompt_tail, self.kernel = k, window, kernel

    def begin(self, model: "PreTrainedModel", cache: DustinCache, tail: torch.Tensor) -> None:
        config = model.config.get_text_config(decoder=True)
        lengths, window = cache.lengths.clone(), self.prompt_tail
        starts = [max(0, length - window) for length in lengths.tolist()]
        held = [[x[i, :, start:].clone() for i, start in enumerate(starts)] for x in _storage(cache)]
        _, queries = tapped_block(model, cache, tail, lengths - window, logits_to_keep=1)
        # the same tokens again, but a block rounds otherwise than the prefill
        for x, rows in zip(_storage(cache), held):
            for i, (start, states) in enumerate(zip(starts, rows)):
                x[i, :, start:] = states
        self.prompt, self.room, found = lengths, cache.capacity - int(lengths.max()), []
        for layer, q in queries.items():
            keys = cache.layers[layer].keys
            chosen = q.new_full((len(lengths), keys.shape[1], self.k), -1, dtype=torch.int32)
            for row, length in enumerate(lengths.tolist()):
                chosen[row] = self._chosen(q[row], keys[row], length, family_of(config).scale(config))
            found.append(chosen.to(lengths.device))
        self.slots = torch.stack(found)  # [layers, B, H, k]

    def _chosen(self, q: torch.Tensor, keys: torch.Tensor, length: int, scale: float) -> torch.Tensor:
        """Slots of one row and layer, `[H, k]`."""
        heads, window = keys.shape[0], self.prompt_tail
        if length <= self.k:
            places = torch.arange(self.k, device=keys.device)
            return places.masked_fill(places >= length, -1).int().expand(heads, -1)
        before = length - window
        shares = attention_rows(q, keys, before, scale)[:, :, :before].mean(1)  # [HQ, before]
        scores = shares.view(heads, -1, before).mean(1)
        scores = torch.nn.functional.max_pool1d(scores[:, None], self.kernel, 1, self.kernel // 2)[:, 0]
        # a maximum is shared by neighbours: of equal scores the earlier slot, on every device
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        best = ranked[:, : self.k - window].sort(-1).values
        observed = torch.arange(before, length, device=keys.device).expand(heads, -1)
        return torch.cat([best, observed], dim=1).int()

    def select(self, signals: Signals) -> Selection:
        # room for every token that is to come, so that shapes stay
        new = recent_slots(signals.lengths, self.prompt, self.room)[None, :, None]
        new = new.expand(len(self.slots), -1, self.slots.shape[2], -1)
        return Selection(torch.cat([self.slots, new], dim=3), tuple(range(len(self.slots))))


def _storage(cache: DustinCache) -> Iterator[torch.Tensor]:
    for layer in cache.layers:
        yield layer.keys
        yield layer.values
