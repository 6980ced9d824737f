"""What later calls of one target use again: cache storage with its captured steps, and fused forwards."""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dustin_hf.cache import DustinCache, DustinLayer
from dustin_hf.forward import input_device
from dustin_hf.fused import FusedForward
from dustin_hf.model_patches.families import ModelFamily

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Sets of storage that wait for a call of their shape; beyond it, or where memory is short, the oldest goes.
MOST_IDLE = 4
# Held by captures, of which torch allows a process one at a time, and while a step that draws random numbers is
# launched: torch's generator of a device serves nobody else during a capture, replays no more than operations.
capturing = threading.RLock()
# Captures run on one stream of each device, whose cuBLAS workspace they share.
_streams: dict[torch.device, torch.cuda.Stream] = {}


class Pool:
    """Lends storage for a `DustinCache` and takes it back once nobody holds that cache any more. CUDA only."""

    def __init__(self) -> None:
        self._idle: list[tuple[tuple, Any, list[DustinLayer]]] = []
        self._lent: weakref.WeakSet[DustinCache] = weakref.WeakSet()
        self._forwards: weakref.WeakKeyDictionary[PreTrainedModel, FusedForward] = weakref.WeakKeyDictionary()
        self._open = True
        self.replaying = threading.RLock()
        self._captured: dict[torch.device, tuple[Any, weakref.WeakSet[torch.cuda.CUDAGraph]]] = {}

    def cache(self, model: "PreTrainedModel", batch: int, capacity: int, device: torch.device) -> DustinCache:
        """An empty cache for rows of `capacity` tokens of a model."""
        config = model.config.get_text_config(decoder=True)
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        if device.type != "cuda":
            return DustinCache(layers, batch, capacity, device)
        kind = (id(model), model.dtype, input_device(model), layers, heads, ModelFamily.head_dim(config))
        key = (*kind, batch, capacity, device)
        fitting = [entry for entry in self._idle if entry[0] == key]
        if fitting:
            _, shared, stored = fitting[-1]
            self._idle = [entry for entry in self._idle if entry[1] is not shared]
            cache = DustinCache.over(shared, stored)
        else:
            cache = DustinCache(layers, batch, capacity, device)
        self._lent.add(cache)
        weakref.finalize(cache, self._take_back, key, cache._shared, cache.layers)
        return cache

    def _take_back(self, key: tuple, shared: Any, layers: list[DustinLayer]) -> None:
        grown = shared.generation > 0  # of another shape by now
        if self._open and not grown and all(layer.is_initialized for layer in layers):
            self._idle = [*self._idle, (key, shared, layers)][-MOST_IDLE:]

    @property
    def idle_bytes(self) -> int:
        """Bytes of storage that nobody uses at present."""
        return sum(x.nbytes for _, _, layers in self._idle for layer in layers for x in (layer.keys, layer.values))

    def make_room(self) -> None:
        """Let go of all storage that waits."""
        self._idle.clear()

    def fused(self, model: "PreTrainedModel", positions: int) -> FusedForward:
        """The fused forward of a model, with its weights as they are now."""
        if model not in self._forwards:
            self._forwards[model] = FusedForward(model, positions)
        else:
            self._forwards[model].prepare(positions)
        return self._forwards[model]

    @contextmanager
    def captured(self, device: torch.device) -> Iterator[torch.cuda.CUDAGraph]:
        """A graph of what runs inside. All of a device share memory, as no two of them replay at the same time.

        Other threads may go on meanwhile, but for what `capturing` is held for, and synchronising a whole device.
        """
        with capturing, torch.cuda.device(device):
            memory, graphs = self._captured.get(device, (None, weakref.WeakSet()))
            alive = list(graphs)  # and kept so: torch takes up no memory again that has lost its last graph
            if not alive:
                memory = torch.cuda.graph_pool_handle()
                self._captured[device] = memory, graphs
            if device not in _streams:  # torch's own is of the device that was current when it was made
                _streams[device] = torch.cuda.Stream(device)
            current, stream = torch.cuda.current_stream(device), _streams[device]
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
                    yield graph
            except BaseException:
                # torch leaves both as they were in the capture
                torch.cuda.set_stream(current)
                del self._captured[device]
                raise
            graphs.add(graph)

    def close(self) -> None:
        """Release everything; caches that the user holds stay what they are, without captured steps."""
        self._open = False
        self.make_room()
        self._forwards.clear()
        for cache in self._lent:
            cache._shared.graphs.clear()


def rounded(capacity: int) -> int:
    """Room for rows of about this length, so that calls of about the same lengths find the same storage."""
    step = max(64, 1 << max(0, capacity.bit_length() - 5))
    return -(-capacity // step) * step
