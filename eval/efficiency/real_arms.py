"""How each arm of `bench decode` decodes real prompts: through `generate`, by the engine's steps, or by stock."""

import statistics
import time
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from dustin_hf._compat import CACHE_ARG
from dustin_hf.acceptance import greedy_accept
from dustin_hf.cache import DustinCache
from dustin_hf.engine import Backend, CapturedSteps, with_fused_forwards
from dustin_hf.eval.efficiency.arms import ARMS, Arm, build
from dustin_hf.model_patches.attention import block_attention
from dustin_hf.modules import walking_once
from dustin_hf.pool import Pool, rounded
from dustin_hf.prefill import prefill
from dustin_hf.profile import DustinProfile
from dustin_hf.stats import StatsRecorder
from dustin_hf.streaming import BatchStreamer
from dustin_hf.testing import left_pad


@dataclass
class Run:
    """One decode of a batch.

    Args:
        seconds: wall time, without prefill.
        prefill_s: seconds of the prefill that it went on from.
        stamps: when each step's tokens were there, by the host's clock.
        committed: kept tokens in each step of each row, as in `GenerationStats`.
        rows: new tokens of each row.
        phases: seconds of each phase of the steps, on the device.
        more: fields for the record.
    """

    seconds: float
    prefill_s: float
    stamps: list[float]
    committed: list[list[int]]
    rows: list[list[int]]
    phases: dict[str, float]
    more: dict[str, Any]


@dataclass
class Point:
    """Prompts of a batch, left-padded, with the caches of both models after their prefill, and its seconds."""

    inputs: dict[str, torch.Tensor]
    lengths: list[int]
    cache: DustinCache
    prefill_s: tuple[float, float]


class Stamps(BatchStreamer):
    """When the prompts and then each step's tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def put_rows(self, rows: list[list[int]]) -> None:
        self.times.append(time.perf_counter())


def fill(target: Any, draft: Any, prompts: list[list[int]], new_tokens: int, gamma: int) -> Point:
    """Prefill caches of both models, and leave them as `generate` would, so that it goes on from them."""
    inputs = {name: x.to(target.device) for name, x in left_pad(prompts).items()}
    ids, lengths = inputs["input_ids"], [len(prompt) for prompt in prompts]
    capacity = rounded(ids.shape[1] + new_tokens + gamma + 1)
    caches, seconds = [], []
    for model in (target, draft):
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        cache = DustinCache(layers, len(prompts), capacity, ids.device)
        begin = now()
        prefill(model, cache, ids, [ids.shape[1] - n for n in lengths], [0] * len(prompts))
        seconds.append(now() - begin)
        caches.append(cache)
    cache = caches[0]
    cache.tokens = ids.new_zeros(len(prompts), capacity)
    for row, prompt in enumerate(prompts):
        cache.tokens[row, : len(prompt)] = torch.tensor(prompt)
    cache.draft, cache.draft_model = caches[1], weakref.ref(draft)
    return Point(inputs, lengths, cache, (seconds[0], seconds[1]))


def speculate(target: Any, draft: Any, point: Point, arm: Arm, gamma: int, budget: int, new_tokens: int) -> Run:
    """An arm that drafts, by `generate`."""
    stamps = Stamps()
    begin = now()
    out = target.generate(
        **point.inputs,
        assistant_model=draft,
        cache_implementation="dustin",
        cache_config={
            "mode": arm.mode,
            "draft_cache": arm.draft_cache,
            "budget": budget,
        },
        num_assistant_tokens=gamma,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        streamer=stamps,
        **{CACHE_ARG: point.cache},
    )
    stats = out.stats
    phases = dict(stats.seconds)
    seconds = now() - begin - phases.pop("prefill")
    width = point.inputs["input_ids"].shape[1]
    rows = [row[width : width + new].tolist() for row, new in zip(out.sequences, stats.new_tokens)]
    more = {"backend": stats.backend, "backend_reason": stats.backend_reason, "kv_read_share": stats.kv_read_share}
    return Run(seconds, sum(point.prefill_s), stamps.times[1:], stats.committed, rows, phases, more)


@walking_once()
def plain(target: Any, draft: Any, point: Point, profile: DustinProfile, new_tokens: int, pool: Pool) -> Run:
    """The vanilla arm, which `generate` does not offer: the engine's own steps without drafts."""
    cache, captures = point.cache, target.device.type == "cuda"
    assert cache.draft is not None
    lengths = [length - 1 for length in point.lengths]
    begin = now()
    decode = build(
        ARMS["vanilla"], target, draft, (cache, cache.draft), lengths, profile, 0, 0, new_tokens, greedy_accept
    )
    decode.state.sequences[:, 1] = point.inputs["input_ids"][:, -1]
    parts = with_fused_forwards(decode.parts, pool) if captures else decode.parts
    recorder, backend = StatsRecorder(target.device), Backend("graph" if captures else "eager", "", whole=captures)
    steps, stamps = CapturedSteps(parts, decode.state, 0, recorder, pool, backend), list[float]()
    with block_attention(target):
        for _ in range(new_tokens):
            steps.run()
            stamps.append(time.perf_counter())
    steps.store()
    seconds = now() - begin
    rows = decode.state.sequences[:, 2 : 2 + new_tokens].tolist()
    phases = Counter(recorder.clock.seconds()) + recorder.replayed
    more = {"backend": steps.backend.name, "backend_reason": steps.backend.reason, "kv_read_share": 1.0}
    return Run(seconds, point.prefill_s[0], stamps, [[1] * new_tokens for _ in rows], rows, dict(phases), more)


def stock(target: Any, prompts: list[list[int]], new_tokens: int) -> Run:
    """Stock `generate`, which prefills by itself."""
    inputs = {name: x.to(target.device) for name, x in left_pad(prompts).items()}
    stamps = Stamps()
    begin = now()
    out = target.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, streamer=stamps)
    rows, times = out[:, inputs["input_ids"].shape[1] :].tolist(), stamps.times[1:]
    steps = [later - earlier for earlier, later in zip(times, times[1:])]
    step = statistics.median(steps[len(steps) // 2 :])  # the first ones allocate
    more = {"steady_step_ms": step * 1e3, "steady_tokens_per_s": len(rows) / step}
    return Run(step * new_tokens, times[0] - begin, times, [[1] * new_tokens for _ in rows], rows, {}, more)


def now() -> float:
    """The host's clock, once the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
