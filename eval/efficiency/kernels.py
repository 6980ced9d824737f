"""`dustin-hf bench kernels`: every op beside its floor and its baselines, and the self-attention of a whole step."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from dustin_hf.eval.efficiency.checks import check_ops
from dustin_hf.eval.efficiency.inputs import SINKS, WINDOW, Point
from dustin_hf.eval.efficiency.point_bench import PointBench
from dustin_hf.eval.efficiency.record import conditions
from dustin_hf.eval.efficiency.shapes import Shape, pair_of
from dustin_hf.eval.efficiency.timing import check_cuda, copy_rate
from dustin_hf.eval.parts import Parts
from dustin_hf.tables import show

SHAPE_NAMES = ("qwen2.5-72b",)
CONTEXTS = (8192, 16384, 32768)
BATCHES = (8, 16)
NOTES = (
    "One layer in bfloat16 with random inputs; all rows are full, and context counts the new tokens too.",
    "us: one call in a CUDA graph, median, lowest and highest of the replays. Inputs rotate so that the L2 cache is "
    "cold: reuse_mb lie between two uses of an input, and cold says whether that is twice the cache.",
    "floor_us: bytes over the rate of a large device copy in this run; share = floor_us / us. Bytes are keys, values "
    "and given scores; what an op or its neighbours have just made is taken to be in the L2 cache. Reading alone can "
    "beat a copy, so a share may be a little above 1.",
    "Scoring: 4 heads of 1 target layer, 4 heads of each of 3 draft layers; each key/value head counts once in the "
    "bytes. select spreads the heads over the key/value heads (most bytes), _grouped takes neighbours (fewest).",
    "sdpa_*: without a causal mask among the new tokens; only their time matters. torch.topk: one tier, unsorted.",
    "step: layers x sparse_attention + select, against layers x full-cache attention. kv_append, the same for all, and "
    "the draft are left out.",
)


def run_kernels(
    shapes: Iterable[str | tuple[Shape, Shape]] = SHAPE_NAMES,
    contexts: Iterable[int] = CONTEXTS,
    batches: Iterable[int] = BATCHES,
    gamma: int = 4,
    budget: int = 512,
    command: str = "",
    progress: Callable[[str], object] | None = None,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """Measure the kernels at every shape, context and batch on the current CUDA device.

    Args:
        shapes: targets by name, with their default drafts, or pairs of target and draft.
        contexts: tokens in each row, the new ones included.
        batches: rows.
        gamma: drafted tokens per step; verification has `gamma + 1` queries.
        budget: slots that verification attends to.
        command: for the record.
        progress: is told of each point before it is measured.
        parts: hold the points that are done.

    Returns:
        Ready for JSON: `conditions`, `options`, `copy_rate_gb_s`, `notes`, `rows` (one per measurement), `steps` (one
        per point), `skipped` (baselines that the device refused, and why), `errors` (of the ops, see `check_ops`).

    Raises:
        ValueError: without a CUDA device or Triton, on an unknown shape, a budget or storage that does not fit, or if
            an op is wrong.
    """
    pairs = [pair_of(shape) if isinstance(shape, str) else shape for shape in shapes]
    contexts, batches = list(contexts), list(batches)
    if min([gamma, *contexts, *batches]) < 1:
        raise ValueError(f"--gamma, --context and --batch must be at least 1, got {gamma}, {contexts} and {batches}")
    check_cuda()
    if find_spec("triton") is None:
        raise ValueError("`dustin-hf bench` measures Triton kernels: pip install 'dustin_hf[triton]'")
    parts = parts or Parts()
    parts.begin()
    rate: float = parts.of("copy rate", copy_rate)
    result: dict[str, Any] = {
        "bench": "kernels",
        "conditions": conditions(command),
        "options": {"gamma": gamma, "budget": budget, "sinks": SINKS, "window": WINDOW, "dtype": "bfloat16"},
        "copy_rate_gb_s": rate,
        "notes": list(NOTES),
        **{name: [] for name in ("rows", "steps", "skipped", "errors")},
    }
    points = [(pair, context, batch) for pair in pairs for context in contexts for batch in batches]
    for (target, draft), context, batch in points:
        if progress is not None:
            progress(f"{target.name} with {draft.name}, context {context}, batch {batch}")
        here = {"shape": target.name, "draft": draft.name, "context": context, "batch": batch}
        size = target, draft, context, batch, gamma, budget
        found = parts.of(", ".join(map(str, here.values())), partial(_measured, size, rate))
        result["errors"].append({**here, **found["errors"]})
        result["rows"] += [{**here, **row} for row in found["rows"]]
        result["skipped"] += [{**here, **entry} for entry in found["skipped"]]
        result["steps"].append({**here, **step_line(found["rows"], target, gamma)})
    return result


@torch.no_grad()
def _measured(size: tuple[Shape, Shape, int, int, int, int], rate: float) -> dict[str, Any]:
    """All measurements of a point, whose storage is free again afterwards."""
    point = Point(*size)
    errors = check_ops(point)
    bench = PointBench(point, rate)
    bench.run()
    return {"errors": errors, "rows": bench.rows, "skipped": bench.skipped}


def step_line(rows: list[dict[str, Any]], target: Shape, gamma: int) -> dict[str, Any]:
    """Self-attention of one step of all target layers, against the full cache, out of the rows of one point.

    Returns:
        Microseconds of each arm and `times_*`, how much longer than the step each takes; None where a baseline was
        skipped. `select_share` is selection's part of the fastest packed arm.
    """
    median = {(row["what"], row["backend"], row["model"], row["q"]): row["us"] for row in rows}

    def all_layers(what: str, backend: str | None = None) -> float | None:
        us = median.get((what, backend, target.name, gamma + 1))
        return us if us is None else us * target.layers

    select, grouped = (median[name, None, target.name, gamma] for name in ("select", "select_grouped"))
    sparse = median["sparse_attention", None, target.name, gamma + 1] * target.layers
    step = sparse + select
    backends = sorted({row["backend"] for row in rows if row["what"] == "sdpa_packed"})
    packed = {backend: us for backend in backends if (us := all_layers("sdpa_packed", backend)) is not None}
    arms = {
        "packed_ours": all_layers("full_attention"),
        "packed_sdpa": min(packed.values(), default=None),
        "unpacked_flash": all_layers("sdpa_unpacked", "flash"),
    }
    best = min(us for name in ("packed_ours", "packed_sdpa") if (us := arms[name]) is not None)
    return {
        "layers": target.layers,
        "q": gamma + 1,
        "sparse_us": sparse,
        "select_us": select,
        "step_us": step,
        **{f"{name}_us": us for name, us in arms.items()},
        "packed_sdpa_backend": min(packed, key=lambda name: packed[name], default=None),
        "times_packed_best": best / step,
        **{f"times_{name}": us if us is None else us / step for name, us in arms.items()},
        "select_share": select / best,
        "select_grouped_share": grouped / best,
    }


def report(result: dict[str, Any]) -> None:
    """Print the result of `run_kernels` as tables."""
    for step in result["steps"]:
        here = {name: step[name] for name in ("shape", "draft", "context", "batch")}
        rows = [row for row in result["rows"] if here.items() <= row.items()]
        show(
            f"{step['shape']} with {step['draft']}, context {step['context']}, batch {step['batch']}",
            ("op", "model", "q", "us", "low", "high", "floor us", "share", "MB", "cold"),
            [
                (
                    row["what"] + (f" {row['backend']}" if row["backend"] else ""),
                    f"{row['model']} {row['layer']}",
                    str(row["q"] or ""),
                    *(f"{row[name]:.1f}" for name in ("us", "low_us", "high_us", "floor_us")),
                    f"{row['share']:.0%}",
                    f"{row['bytes'] / 1e6:.1f}",
                    "yes" if row["cold"] else "no",
                )
                for row in rows
            ],
        )
    arms = ("packed_ours", "packed_sdpa", "unpacked_flash")
    show(
        "self-attention of a step in ms, and full-cache attention as a multiple of it",
        (
            "target",
            "context",
            "batch",
            "q",
            "sparse",
            "select",
            "step",
            *arms,
            *(f"x {a}" for a in arms),
            "select share",
        ),
        [
            (
                *(str(step[name]) for name in ("shape", "context", "batch", "q")),
                *(_number(step[f"{name}_us"], 1e-3, 3) for name in ("sparse", "select", "step", *arms)),
                *(_number(step[f"times_{arm}"], 1, 1) for arm in arms),
                f"{step['select_share']:.2%}",
            )
            for step in result["steps"]
        ],
    )
    skipped = [f"skipped: {s['what']} {s['backend']}, q = {s['q']}: {s['reason']}" for s in result["skipped"]]
    machine = f"{result['conditions']['gpu']}, copy rate {result['copy_rate_gb_s']:.0f} GB/s"
    print(*dict.fromkeys(skipped), machine, *result["notes"], sep="\n")  # points skip alike


def _number(value: float | None, factor: float, digits: int) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"
