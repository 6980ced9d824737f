"""The stock arms of `bench decode`: transformers' own `generate` over a cache of random keys and values."""

import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache, StaticCache
from transformers.generation.streamers import BaseStreamer

from dustin_hf._compat import CACHE_ARG
from dustin_hf.eval.efficiency.shapes import Shape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STOCK_ARMS = ("hf", "hf-static")
NEW = {"hf": 10, "hf-static": 14}


class _Times(BaseStreamer):
    """When each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def stock_steps(model: "PreTrainedModel", shape: Shape, batch: int, context: int, arm: str) -> dict[str, Any]:
    """Median time of a decode step of stock `generate`: greedy, sdpa, a dynamic or a static (compiled) cache.

    Returns:
        `step_ms` with the fastest and slowest, and `tokens_per_s`; `error` instead where it does not run.
    """
    try:
        times = _step_times(model, shape, batch, context, arm)
    except (RuntimeError, torch.OutOfMemoryError, ValueError) as error:
        torch.cuda.empty_cache()
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    torch.cuda.empty_cache()
    ms = statistics.median(times) * 1e3
    return {
        "step_ms": ms,
        "step_ms_low": min(times) * 1e3,
        "step_ms_high": max(times) * 1e3,
        "tokens_per_s": batch / ms * 1e3,
        "tau": 1.0,
        "steps": len(times),
    }


def _step_times(model: Any, shape: Shape, batch: int, context: int, arm: str) -> list[float]:
    new = NEW[arm]
    cache: Any
    if arm == "hf":
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=context + new + 2)
    for layer in range(shape.layers):
        states = [
            torch.randn(batch, shape.kv_heads, context, shape.head_dim, dtype=torch.bfloat16, device="cuda")
            for _ in range(2)
        ]
        cache.update(*states, layer, {"cache_position": torch.arange(context, device="cuda")})
    ids = torch.randint(3, shape.vocab, (batch, context + 1), device="cuda")
    watch = _Times()
    with torch.no_grad():
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=watch,
            **{CACHE_ARG: cache},
        )
    steps = [later - earlier for earlier, later in zip(watch.times[1:], watch.times[2:])]
    return steps[len(steps) // 2 :]  # the first ones compile and warm up
