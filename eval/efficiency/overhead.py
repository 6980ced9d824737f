"""`bench overhead`: what estimating importance costs, over full-cache attention (paper figure 8)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from dustin_hf.eval.baselines.quest import bounds_of, page_limits
from dustin_hf.eval.efficiency.inputs import DRAFT_SCORE_LAYERS, SINKS, TARGET_SCORE_LAYERS, WINDOW, Layer, Point
from dustin_hf.eval.efficiency.record import conditions
from dustin_hf.eval.efficiency.shapes import Shape
from dustin_hf.eval.efficiency.timing import check_cuda, copy_rate, time_graph
from dustin_hf.eval.parts import Parts
from dustin_hf.kernels.full_attention import full_attention
from dustin_hf.kernels.srh_score import srh_score
from dustin_hf.kernels.topk_select import topk_select
from dustin_hf.tables import show

CONTEXTS = (4096, 8192, 16384, 32768, 65536)
ESTIMATORS = ("hybrid", "target", "draft", "quest-16", "naive")
ROTATIONS = 6
NOTES = (
    "us: scoring and selection of one step, calls in a CUDA graph over inputs that rotate. attention_us: full-cache "
    "attention of all target layers over gamma + 1 queries, packed (`full_attention`). share: us over it.",
    "hybrid: 4 heads of 1 target layer and 4 heads of each of 3 draft layers, spread over the key/value heads; target, "
    "draft: those of one model alone. naive: all heads of all layers of both models.",
    "quest-16: of every target layer but two, bounds of pages of 16 slots by minima and maxima that are kept, and the "
    "best pages; in PyTorch, not the authors' kernel. One layer is timed, and counted as often as there are layers.",
)


def run_overhead(
    target: Shape,
    draft: Shape,
    contexts: Sequence[int] = CONTEXTS,
    batch: int = 8,
    gamma: int = 4,
    budget: int = 512,
    command: str = "",
    progress: Callable[[str], object] | None = None,
    parts: Parts | None = None,
) -> dict[str, Any]:
    """Time estimators on random inputs.

    Args:
        target: its shape.
        draft: its shape.
        contexts: tokens in each row, the new ones included.
        batch: rows.
        gamma: drafted tokens per step.
        budget: slots that are chosen.
        command: for the record.
        progress: is told what comes next.
        parts: hold the contexts that are done.

    Returns:
        Ready for JSON: `rows`, one for each context and estimator, and `conditions`.

    Raises:
        ValueError: without a CUDA device, or if the storage does not fit it.
    """
    check_cuda()
    parts = parts or Parts()
    parts.begin()
    rate, rows = parts.of("copy rate", copy_rate), []
    for context in contexts:
        if progress is not None:
            progress(f"{target.name} with {draft.name}, {batch} x {context:,}")
        size = target, draft, context, batch, gamma, budget
        rows += parts.of(str(context), partial(_measured, size))
    return {
        "bench": "overhead",
        "target": target.name,
        "draft": draft.name,
        "batch": batch,
        "rows": rows,
        "options": {"gamma": gamma, "budget": budget, "sinks": SINKS, "window": WINDOW},
        "copy_rate_gb_s": rate,
        "notes": list(NOTES),
        "conditions": conditions(command),
    }


@torch.no_grad()
def _measured(size: tuple[Shape, Shape, int, int, int, int]) -> list[dict[str, Any]]:
    """The estimators at a point, whose storage is free again afterwards."""
    times = _Estimators(Point(*size))
    attention = times.attention()
    found = {name: times.of(name) for name in ESTIMATORS}
    return [
        {"estimator": name, "context": size[2], "us": us, "attention_us": attention, "share": us / attention}
        for name, us in found.items()
    ]


class _Estimators:
    """Times in microseconds of one step at a point."""

    def __init__(self, point: Point):
        self.point = point

    def attention(self) -> float:
        """Full-cache attention of all target layers."""
        point, layer = self.point, self.point.target
        q = _queries(point, layer, point.new, layer.shape.q_heads)
        start = point.rows(point.context - point.new)
        one = self._time(lambda i: full_attention(q, *layer.kv(i), start, layer.scale))
        return one * layer.shape.layers

    def of(self, name: str) -> float:
        """One estimator, selection included."""
        point, target, draft = self.point, self.point.target, self.point.draft
        if name == "quest-16":
            return self._quest() * (target.shape.layers - 2)
        if name == "naive":
            by_target = self._score(target, target.shape.q_heads, 1) * target.shape.layers
            return (
                by_target + self._score(draft, draft.shape.q_heads, point.gamma) * draft.shape.layers + self._select()
            )
        total = self._select()
        if name in ("hybrid", "target"):
            total += self._score(target, None, 1) * TARGET_SCORE_LAYERS
        if name in ("hybrid", "draft"):
            total += self._score(draft, None, point.gamma) * DRAFT_SCORE_LAYERS
        return total

    def _score(self, layer: Layer, heads: int | None, queries: int) -> float:
        """Scoring of one layer: all heads, or the few of a profile, spread over the key/value heads."""
        point = self.point
        kv_heads = layer.kv_heads(spread=True)
        if heads is not None:
            kv_heads = torch.arange(heads, device="cuda") // layer.shape.group
        q, out = _queries(point, layer, queries, len(kv_heads)), torch.zeros(point.batch, point.context, device="cuda")
        counts, lengths = point.rows(queries), point.lengths
        return self._time(lambda i: srh_score(out, q, layer.kv(i)[0], kv_heads, lengths, counts, layer.scale))

    def _select(self) -> float:
        point, scores = self.point, self.point.scores

        def call(i: int) -> object:
            pair = scores[2 * i], scores[2 * i + 1]
            return topk_select(*pair, point.lengths, point.quota, SINKS, WINDOW, point.budget)

        return self._time(call)

    def _quest(self) -> float:
        """One layer."""
        point, layer = self.point, self.point.target
        q, page = _queries(point, layer, point.new, layer.shape.q_heads), 16
        limits = [page_limits(layer.kv(i)[0], point.lengths, page) for i in range(len(layer.keys))]

        def call(i: int) -> object:
            return bounds_of(q, *limits[i % len(limits)]).amax(2).topk(point.budget // page, dim=-1)

        return self._time(call)

    def _time(self, call: Callable[[int], object]) -> float:
        return time_graph(call, ROTATIONS).median_us


def _queries(point: Point, layer: Layer, count: int, heads: int) -> torch.Tensor:
    size = (point.batch, count, heads, layer.shape.head_dim)
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


def report(result: dict[str, Any]) -> None:
    """Print a table: estimators by context, as shares of full-cache attention."""
    contexts = list(dict.fromkeys(row["context"] for row in result["rows"]))
    share = {(row["estimator"], row["context"]): row["share"] for row in result["rows"]}
    show(
        f"estimation over full-cache attention, {result['target']} with {result['draft']}, batch {result['batch']}",
        ("estimator", *map(str, contexts)),
        [(name, *(f"{share[name, context]:.2%}" for context in contexts)) for name in ESTIMATORS],
    )
    print(result["conditions"]["gpu"], *result["notes"], sep="\n")
