"""DustinCache: ragged rows in storage that is allocated once; slot equals position; rolling back changes lengths."""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dustin_hf.kernels.kv_append import kv_append

# Storage outlives the call that makes it: tensors made under `inference_mode` could not be written outside of it.
ordinary_tensors = torch.inference_mode(False)


@dataclass
class _Shared:
    """What all layers of one cache share.

    `lengths [B]` counts the tokens each row holds. While something writes, exactly one of the two cursors is set:
    `rows` (with `rows_start`) for the prefill of some rows, `start [B]` for a block of new tokens in every row.
    """

    capacity: int
    lengths: torch.Tensor
    rows: slice | None = None
    rows_start: int = 0
    start: torch.Tensor | None = None
    starts: dict[torch.device, torch.Tensor] = field(default_factory=dict)
    # captured steps that point at this storage, by what else they depend on; and how often it was replaced
    graphs: dict[Any, Any] = field(default_factory=dict)
    generation: int = 0

    def __getstate__(self) -> dict:
        """Copies have storage of their own, to which no graph points."""
        return {**self.__dict__, "graphs": {}, "generation": 0}

    def replaced(self) -> None:
        """Note that tensors have given way to others: graphs that point at them are of no use any more."""
        self.graphs.clear()
        self.generation += 1

    def start_on(self, device: torch.device) -> torch.Tensor:
        """The block cursor on the device of a layer, copied there once per block."""
        assert self.start is not None
        if device not in self.starts:
            self.starts[device] = self.start.to(device)
        return self.starts[device]


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device


class DustinLayer(CacheLayerMixin):
    """Keys and values of one layer, `[B, H, capacity, D]` each, allocated from the first states written.

    Dtype and device follow those states, so quantised weights, autocast and split models need no special care.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False
    supports_early_init = False
    keys: torch.Tensor  # type: ignore[assignment]  # None until is_initialized
    values: torch.Tensor  # type: ignore[assignment]

    def __init__(self, shared: _Shared):
        super().__init__()
        self.shared = shared

    @ordinary_tensors
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        heads, head_dim = key_states.shape[1], key_states.shape[3]
        shape = (len(self.shared.lengths), heads, self.shared.capacity, head_dim)
        # Zeros, not empty memory: a masked slot is multiplied by 0, which would keep a stray NaN.
        self.keys = key_states.new_zeros(shape)
        self.values = value_states.new_zeros(shape)
        self.is_initialized = True

    @ordinary_tensors
    def _move(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Go on in other dtypes, or elsewhere, than an earlier call: under another autocast, or the model was moved."""
        self.keys, self.values = self.keys.to(keys), self.values.to(values)
        self.shared.replaced()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new states `[rows, H, L, D]` at the cursor and return what the attention function reads.

        During the prefill of some rows: their states so far, `[rows, H, start + L, D]`. During a block: the whole
        storage `[B, H, capacity, D]`.

        Raises:
            RuntimeError: when no Dustin generation is running, since a plain forward would misplace ragged rows.
        """
        shared = self.shared
        if shared.rows is None and shared.start is None:
            raise RuntimeError(
                "a DustinCache is written only inside generate(..., cache_implementation='dustin'); "
                "plain forwards need a DynamicCache"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        elif not (_alike(self.keys, key_states) and _alike(self.values, value_states)):
            self._move(key_states, value_states)
        if shared.rows is None:
            kv_append(self.keys, self.values, key_states, value_states, shared.start_on(self.keys.device))
            return self.keys, self.values
        end = shared.rows_start + key_states.shape[2]
        self.keys[shared.rows, :, shared.rows_start : end] = key_states
        self.values[shared.rows, :, shared.rows_start : end] = value_states
        return self.keys[shared.rows, :, :end], self.values[shared.rows, :, :end]

    def get_seq_length(self) -> int:
        """Tokens before the next ones: of the rows being prefilled, else of the longest row."""
        if self.shared.rows is not None:
            return self.shared.rows_start
        return int(self.shared.lengths.max())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self.shared.capacity


class DustinCache(Cache):
    """A KV cache for ragged batches: every row holds its own tokens from slot 0 and never a pad.

    `generate` returns one, and continues from it in the next call: whatever the new prompts share with the tokens held
    is not computed again. So a prompt may go on, differ from some token on, or be shorter than what is held.

    Args:
        num_layers (`int`): layers of the model.
        batch_size (`int`): rows.
        capacity (`int`): slots of each row, at least its longest length plus the tokens of one block.
        device: where `lengths` lives; layers follow the states written into them.

    Attributes:
        lengths (`torch.LongTensor` of shape `[B]`): tokens held by each row. Slots at and after it are stale.
        tokens (`torch.LongTensor` of shape `[B, capacity]`): the token of each slot, set when `generate` returns.
        draft (`DustinCache`, *optional*): the assistant's cache of the same rows, kept for the next call.
        draft_model (`weakref.ref`, *optional*): the assistant it belongs to.
    """

    layers: list[DustinLayer]  # type: ignore[assignment]

    @ordinary_tensors
    def __init__(self, num_layers: int, batch_size: int, capacity: int, device: torch.device | str = "cpu"):
        self._shared = _Shared(capacity, torch.zeros(batch_size, dtype=torch.long, device=device))
        super().__init__(layers=[DustinLayer(self._shared) for _ in range(num_layers)])
        self.tokens = torch.zeros(batch_size, 0, dtype=torch.long, device=device)
        self.draft: DustinCache | None = None
        self.draft_model: weakref.ref | None = None

    def __getstate__(self) -> dict:
        """A pickle leaves the draft behind: another process has another assistant, which fills its cache anew."""
        return {**self.__dict__, "draft": None, "draft_model": None}

    def __deepcopy__(self, memo: dict) -> "DustinCache":
        clone = memo[id(self)] = type(self).__new__(type(self))
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return clone

    @classmethod
    def over(cls, shared: _Shared, layers: list[DustinLayer]) -> "DustinCache":
        """An empty cache in storage that another one has left."""
        cache = cls(0, len(shared.lengths), 0, shared.lengths.device)
        cache._shared, cache.layers = shared, layers
        cache.reset()
        return cache

    @property
    def lengths(self) -> torch.Tensor:
        return self._shared.lengths

    @lengths.setter
    def lengths(self, value: torch.Tensor) -> None:
        self._shared.lengths.copy_(value)  # in place: captured steps point at it

    @property
    def capacity(self) -> int:
        return self._shared.capacity

    @property
    def batch_size(self) -> int:
        return len(self._shared.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of the allocated storage, without the draft's."""
        return sum(x.nbytes for layer in self.layers if layer.is_initialized for x in (layer.keys, layer.values))

    @contextmanager
    def writing_rows(self, rows: slice, start: int) -> Iterator[None]:
        """Let forwards of some rows alone write their tokens from slot `start` on."""
        self._shared.rows, self._shared.rows_start = rows, start
        try:
            yield
        finally:
            self._shared.rows = None

    @contextmanager
    def writing_block(self, start: torch.Tensor) -> Iterator[None]:
        """Let forwards of the whole batch write new tokens from slot `start[b]` on; negative slots are skipped."""
        self._shared.start, self._shared.starts = start, {}
        try:
            yield
        finally:
            self._shared.start, self._shared.starts = None, {}

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every row; 0 changes nothing, a shorter row becomes empty.

        Raises:
            ValueError: on a positive number, as in transformers since 5.18.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"`crop` takes the number of tokens to remove as a negative integer, got {tokens_to_remove}"
            )
        self.lengths = (self.lengths + tokens_to_remove).clamp(min=0)
        if self.draft is not None:
            self.draft.crop(tokens_to_remove)

    def reset(self) -> None:
        """Forget all tokens; the storage stays allocated."""
        self.lengths = torch.zeros_like(self.lengths)
        if self.draft is not None:
            self.draft.reset()

    @ordinary_tensors
    def grow(self, capacity: int) -> None:
        """Make room for `capacity` slots in each row, keeping what is held; fewer than there are changes nothing."""
        more = capacity - self.capacity
        if more <= 0:
            return
        self._shared.capacity = capacity
        self._shared.replaced()
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys = torch.nn.functional.pad(layer.keys, (0, 0, 0, more))
                layer.values = torch.nn.functional.pad(layer.values, (0, 0, 0, more))

    def copy_slots(self, source: int, row: int, start: int, end: int) -> None:
        """Copy slots `start .. end - 1` of the row `source` to another row, in every layer."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[row, :, start:end] = layer.keys[source, :, start:end]
                layer.values[row, :, start:end] = layer.values[source, :, start:end]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    @ordinary_tensors
    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`, in that order, repeats allowed."""
        self._shared.lengths = self.lengths[indices.to(self.lengths.device)]
        self._shared.replaced()
        self.tokens = self.tokens[indices.to(self.tokens.device)]
        if self.draft is not None:
            self.draft.batch_select_indices(indices)
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys = layer.keys[indices.to(layer.keys.device)]
                layer.values = layer.values[indices.to(layer.values.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, copies side by side."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def check_integrity(self) -> None:
        """Raise `RuntimeError` unless lengths fit the storage and held keys and values are finite. Slow: for tests."""
        shared = self._shared
        if shared.rows is not None or shared.start is not None:
            raise RuntimeError("the cache is still being written")
        if not bool(((shared.lengths >= 0) & (shared.lengths <= shared.capacity)).all()):
            raise RuntimeError(f"lengths {shared.lengths.tolist()} leave 0 .. capacity {shared.capacity}")
        for i, layer in enumerate(self.layers):
            if not layer.is_initialized:
                if int(shared.lengths.max()) > 0:
                    raise RuntimeError(f"layer {i} holds no storage for lengths {shared.lengths.tolist()}")
                continue
            for name, x in (("keys", layer.keys), ("values", layer.values)):
                if (x.shape[0], x.shape[2]) != (len(shared.lengths), shared.capacity):
                    raise RuntimeError(f"layer {i} {name} {tuple(x.shape)} is not [B, H, capacity, D]")
                held = torch.arange(shared.capacity, device=x.device) < shared.lengths.to(x.device)[:, None]
                if not bool(x.isfinite().all(-1).all(1)[held].all()):
                    raise RuntimeError(f"layer {i} {name} has a held token that is not finite")
