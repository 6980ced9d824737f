"""`bench decode` on random weights: every arm in one process, each beside its floor; acceptance is simulated."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.engine import Backend, CapturedSteps, with_fused_forwards
from dustin_hf.eval.efficiency.arms import ARMS, SINKS, Arm, Decode, SimulatedAcceptance, build, paper_heads
from dustin_hf.eval.efficiency.record import conditions
from dustin_hf.eval.efficiency.shapes import Shape
from dustin_hf.eval.efficiency.stock import STOCK_ARMS, stock_steps
from dustin_hf.eval.efficiency.timing import check_cuda, copy_rate
from dustin_hf.eval.parts import Parts
from dustin_hf.model_patches.attention import block_attention
from dustin_hf.pool import Pool
from dustin_hf.stats import StatsRecorder
from dustin_hf.tables import show

if TYPE_CHECKING:
    from transformers import PreTrainedModel

STEPS, REPEATS = 20, 5
NOTES = (
    "Random weights; caches filled with random keys and values, not by a prefill. 4 target heads of one layer and 12 "
    "draft heads of three are scored. floor_ms: bytes of a step over the copy rate of this run."
)


def run_decode(
    target: Shape,
    draft: Shape,
    contexts: Sequence[int],
    batches: Sequence[int],
    gamma: int,
    budget: int,
    arms: Sequence[str],
    taus: Sequence[float],
    command: str,
    ragged: bool = False,
    progress: Callable[[str], None] | None = None,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """Decode with random weights over caches of random keys and values.

    Args:
        target: its shape.
        draft: its shape.
        contexts: tokens per row before decoding.
        batches: rows.
        gamma: drafts per step.
        budget: slots that sparse verification reads.
        arms: names of `ARMS` and `STOCK_ARMS`.
        taus: mean tokens per step of the simulated acceptance; every arm that drafts is measured with each.
        command: as typed, for the record.
        ragged: rows of lengths from half the context to all of it, instead of equal ones.
        progress: is told what comes next.
        parts: hold the arms that are done.

    Returns:
        Ready for JSON: `rows`, one for each arm and point, and `conditions`.

    Raises:
        ValueError: without a CUDA device, or on an unknown arm or an impossible tau.
    """
    check_cuda()
    unknown = sorted(set(arms) - set(ARMS) - set(STOCK_ARMS))
    if unknown:
        raise ValueError(f"--arms must be of {', '.join([*STOCK_ARMS, *ARMS])}, got {', '.join(unknown)}")
    accepts = [SimulatedAcceptance(tau, gamma) for tau in taus]
    say = progress or (lambda text: None)
    parts = parts or Parts()
    parts.begin()
    rate: float = parts.of("copy rate", copy_rate)
    rows = []
    new_tokens = (STEPS + 4) * (gamma + 1)
    models = random_model(target), random_model(draft)
    floor = functools.partial(step_bytes, target, draft)
    for batch in batches:
        capacity = max(contexts) + new_tokens + gamma + 1
        caches = random_cache(target, batch, capacity), random_cache(draft, batch, capacity)
        for context in contexts:
            lengths = [context] * batch
            if ragged:
                lengths = [context // 2 + (context - context // 2) * i // max(1, batch - 1) for i in range(batch)]
            for name in [arm for arm in arms if arm in ARMS]:
                arm = ARMS[name]
                for tau, accept in list(zip(taus, accepts))[: None if arm.draft_cache else 1]:
                    say(f"{target.name}, {batch} x {context:,}: {name}")
                    how = lengths, paper_heads(target, draft), gamma, budget, new_tokens, accept
                    row: dict[str, Any] = {"arm": name, "context": context, "batch": batch, "ragged": ragged}
                    row |= parts.of(
                        f"{name}, {batch} x {context}, tau {tau}",
                        functools.partial(_measured, arm, models, caches, how),
                    )
                    row["floor_ms"] = floor(arm, lengths, row["gamma"], budget) / rate / 1e6
                    rows.append(row)
        del caches
        torch.cuda.empty_cache()
        for context in contexts:
            for name in [arm for arm in arms if arm in STOCK_ARMS]:
                say(f"{target.name}, {batch} x {context:,}: {name}")
                row = {"arm": name, "context": context, "batch": batch, "ragged": False, "gamma": 0, "budget": None}
                stock = functools.partial(stock_steps, models[0], target, batch, context, name)
                row |= parts.of(f"{name}, {batch} x {context}", stock)
                row["floor_ms"] = floor(ARMS["vanilla"], [context] * batch, 0, 0) / rate / 1e6
                rows.append(row)
    return {
        "rows": with_ratios(rows),
        "bench": "decode",
        "target": target.name,
        "draft": draft.name,
        "acceptance": f"simulated, tau = {', '.join(map(str, taus))}, the same for every arm that drafts",
        "notes": NOTES,
        "copy_rate_gb_s": rate,
        "conditions": conditions(command),
    }


def random_model(shape: Shape) -> "PreTrainedModel":
    """A model of this shape with random weights, bfloat16, on the current CUDA device."""
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(shape.config(2**18), dtype=torch.bfloat16)
    return model.eval()


def random_cache(shape: Shape, batch: int, capacity: int) -> DustinCache:
    """A cache of this shape whose every slot holds random keys and values."""
    cache = DustinCache(shape.layers, batch, capacity, "cuda")
    for layer in cache.layers:
        states = torch.empty(batch, shape.kv_heads, 1, shape.head_dim, dtype=torch.bfloat16, device="cuda")
        layer.lazy_initialization(states, states)
        layer.keys.normal_()
        layer.values.normal_()
    return cache


def _measured(
    arm: Arm, models: tuple[Any, Any], caches: tuple[DustinCache, DustinCache], how: tuple[Any, ...]
) -> dict[str, Any]:
    """What `measure` finds of an arm; `how` are the further arguments of `build`."""
    decode = build(arm, *models, caches, *how)
    return {"gamma": decode.gamma, "budget": how[3] if arm.sparse else None, **measure(decode)}


@torch.no_grad()
def measure(decode: Decode, steps: int = STEPS, repeats: int = REPEATS) -> dict[str, Any]:
    """Time the steps of an arm as the engine runs them, one synchronisation a step included.

    Returns:
        Medians over repeats: `step_ms`, with the fastest and slowest, `tokens_per_s` of committed tokens, `tau`, and
        `phases_ms` by events inside the captured step.
    """
    pool = Pool()
    parts = with_fused_forwards(decode.parts, pool)
    recorder = StatsRecorder(decode.state.sequences.device)
    captured = CapturedSteps(parts, decode.state, decode.gamma, recorder, pool, Backend("graph", "", whole=True))
    with block_attention(parts.forward.model):
        for _ in range(4):
            captured.run()
    graph = captured.graph
    if graph is None:
        raise RuntimeError(f"the step of {decode.arm.name} was not captured: {captured.backend.reason}")
    begin = {name: getattr(graph.state, name).clone() for name in ("first", "finished")}
    times, committed = [], []
    for _ in range(repeats):
        decode.rewind()
        for name, value in begin.items():
            getattr(graph.state, name).copy_(value)
        recorder.replayed.clear()
        torch.cuda.synchronize()
        started = time.perf_counter()
        reports = [captured.run() for _ in range(steps)]
        times.append((time.perf_counter() - started) / steps * 1e3)
        committed.append(sum(sum(report[2]) for report in reports))
    parts.cache._shared.graphs.clear()
    rates = [tokens / (ms * steps) * 1e3 for tokens, ms in zip(committed, times)]
    return {
        "step_ms": statistics.median(times),
        "step_ms_low": min(times),
        "step_ms_high": max(times),
        "tokens_per_s": statistics.median(rates),
        "tau": statistics.mean(committed) / steps / len(decode.start),
        "phases_ms": {name: seconds / steps * 1e3 for name, seconds in recorder.replayed.items()},
        "steps": steps,
        "repeats": repeats,
    }


def step_bytes(target: Shape, draft: Shape, arm: Arm, lengths: list[int], gamma: int, budget: int) -> float:
    """Bytes that a step has to read: weights of both models once per forward, cached keys and values, scored keys."""
    total, rows = float(sum(lengths)), len(lengths)
    read = rows * (budget + gamma + 1) if arm.sparse else total + rows
    needed = target.weight_bytes() + read * target.kv_bytes_per_token()
    if arm.draft_cache is not None:
        own = {"full": total, "streaming": rows * (budget + SINKS), "sparse": rows * budget}
        needed += gamma * (draft.weight_bytes() + own[arm.draft_cache] * draft.kv_bytes_per_token())
    if arm.mode == "specattn":
        needed += total * draft.layers * draft.kv_heads * draft.head_dim * 2
    elif arm.sparse:
        for shape, layers in ((target, 1), (draft, 3)):
            needed += total * layers * min(4, shape.kv_heads) * shape.head_dim * 2
    return needed


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each row, its speed over that of the baselines at the same point."""
    for row in rows:
        for base in ("vanilla", "hf"):
            same = [
                other
                for other in rows
                if other["arm"] == base
                and all(other[key] == row[key] for key in ("context", "batch", "ragged"))
                and other.get("tokens_per_s")
            ]
            if same and row.get("tokens_per_s"):
                row[f"over_{base}"] = row["tokens_per_s"] / same[0]["tokens_per_s"]
        if row.get("step_ms"):
            row["floor_share"] = row["floor_ms"] / row["step_ms"]
    return rows


# Columns of the tables: title, field, digits; "%" for shares. Those that no row has are left out.
COLUMNS: tuple[tuple[str, str, int | str], ...] = (
    ("gamma", "gamma", 0),
    ("budget", "budget", 0),
    ("prefill s", "prefill_s", 2),
    ("step ms", "step_ms", 2),
    ("low", "step_ms_low", 2),
    ("high", "step_ms_high", 2),
    ("steady ms", "steady_step_ms", 2),
    ("floor ms", "floor_ms", 2),
    ("share", "floor_share", "%"),
    ("tau", "tau", 2),
    ("tau fresh", "tau_fresh", 2),
    ("fresh rows", "fresh_rows", 0),
    ("copied", "copied", "%"),
    ("repeated", "repeated", "%"),
    ("tok/s", "tokens_per_s", 0),
    ("steady tok/s", "steady_tokens_per_s", 0),
    *((f"x {base}", f"over_{base}", 2) for base in ("vanilla", "classic", "magicdec", "hf")),
)


def report(result: dict[str, Any]) -> None:
    """Print the result of `run_decode`, or of `run_real`, as one table for each point."""

    def cell(value: Any, digits: int | str) -> str:
        if value is None:
            return "-"
        return f"{value:.0%}" if digits == "%" else f"{value:,.{digits}f}"

    for context, batch in dict.fromkeys((row["context"], row["batch"]) for row in result["rows"]):
        rows = [row for row in result["rows"] if (row["context"], row["batch"]) == (context, batch)]
        columns = [column for column in COLUMNS if any(row.get(column[1]) is not None for row in rows)]
        kind = "up to " if any(row["ragged"] for row in rows) else ""
        show(
            f"{result['target']} with {result['draft']}, context {kind}{context}, batch {batch}",
            ("arm", *(title for title, _, _ in columns)),
            [(row["arm"], *(cell(row.get(field), digits) for _, field, digits in columns)) for row in rows],
        )
    for row in result["rows"]:
        if "error" in row:
            print(f"{row['arm']}, context {row['context']}, batch {row['batch']}: {row['error']}")
    rate = result["copy_rate_gb_s"]
    machine = result["conditions"]["gpu"] or "no GPU"
    print(f"acceptance {result['acceptance']}", machine + (f", copy rate {rate:.0f} GB/s" if rate else ""), sep="\n")
    print(result["notes"] if isinstance(result["notes"], str) else "\n".join(result["notes"]))
