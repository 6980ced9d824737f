"""The measurements of one bench point: every op and every baseline, a row each."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dustin_hf.eval.efficiency import sdpa
from dustin_hf.eval.efficiency.inputs import (
    DRAFT_SCORE_LAYERS,
    SINKS,
    TARGET_SCORE_LAYERS,
    WINDOW,
    Layer,
    Point,
    attention_bytes,
    sets_for,
)
from dustin_hf.eval.efficiency.timing import time_graph
from dustin_hf.kernels.full_attention import full_attention
from dustin_hf.kernels.kv_append import kv_append
from dustin_hf.kernels.sparse_attention import sparse_attention
from dustin_hf.kernels.srh_score import srh_score
from dustin_hf.kernels.topk_select import topk_select

Call = Callable[[int], object]


class PointBench:
    """Measures a point.

    Args:
        point: its inputs.
        rate: copy rate of the device in GB/s, for the floors.

    Attributes:
        rows: a dict for each measurement.
        skipped: baselines that the device refused, and why.
    """

    def __init__(self, point: Point, rate: float):
        self.point, self.rate = point, rate
        self.cache_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self.rows: list[dict[str, Any]] = []
        self.skipped: list[dict[str, Any]] = []

    def run(self) -> None:
        """Fill `rows` and `skipped`."""
        point = self.point
        for new in (1, point.new):
            self._full(point.target, new)
            self._baselines(new)
        self._full(point.draft, 1)
        self._sparse(point.target, point.new)
        self._sparse(point.draft, 1)
        self._append()
        self._choosing()
        for spread in (True, False):
            self._scoring(spread)

    def _measure(self, what: str, layer: Layer, q: int, needed: int, call: Call, backend: str | None = None) -> None:
        """Time `call(i)` over enough input sets, and add its row; `needed` bytes have to move in one call."""
        sets, shape, floor = sets_for(needed), layer.shape, needed / self.rate / 1e3
        timing = time_graph(call, sets)
        self.rows.append(
            {
                "what": what,
                "backend": backend,
                "model": shape.name,
                "layer": f"{shape.q_heads}/{shape.kv_heads}x{shape.head_dim}",
                "q": q,
                "us": timing.median_us,
                "low_us": timing.low_us,
                "high_us": timing.high_us,
                "bytes": needed,
                "floor_us": floor,
                "share": floor / timing.median_us,
                "reuse_mb": sets * needed / 1e6,
                "cold": sets * needed >= 2 * self.cache_bytes,
            }
        )

    def _states(self, layer: Layer, *size: int) -> torch.Tensor:
        """Random queries, keys or values of new tokens, `[B, *size, D]`."""
        size = (self.point.batch, *size, layer.shape.head_dim)
        return torch.randn(size, dtype=torch.bfloat16, device="cuda")

    def _full(self, layer: Layer, new: int) -> None:
        point = self.point
        q, start = self._states(layer, new, layer.shape.q_heads), point.rows(point.context - new)
        needed = attention_bytes(layer.shape, point.batch, point.context)
        self._measure(
            "full_attention", layer, new, needed, lambda i: full_attention(q, *layer.kv(i), start, layer.scale)
        )

    def _sparse(self, layer: Layer, new: int) -> None:
        point, indices = self.point, self.point.indices
        q, start = self._states(layer, new, layer.shape.q_heads), point.lengths

        def call(i: int) -> object:
            return sparse_attention(q, *layer.kv(i), indices[i], start, layer.scale)

        needed = attention_bytes(layer.shape, point.batch, point.budget + new)
        self._measure("sparse_attention", layer, new, needed, call)

    def _baselines(self, new: int) -> None:
        layer, shape = self.point.target, self.point.target.shape
        plain = self._states(layer, shape.q_heads, new)
        grouped = self._states(layer, shape.kv_heads, new * shape.group)

        def packed(backend: str, i: int) -> object:
            return sdpa.packed(backend, grouped, *layer.kv(i))

        calls: list[tuple[str, str, Call]] = [("sdpa_unpacked", "flash", lambda i: sdpa.unpacked(plain, *layer.kv(i)))]
        calls += [("sdpa_packed", name, partial(packed, name)) for name in sdpa.PACKED_BACKENDS]
        needed = attention_bytes(shape, self.point.batch, self.point.context)
        for what, backend, call in calls:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each backend that is passed over says so
                try:
                    self._measure(what, layer, new, needed, call, backend)
                except RuntimeError as error:  # not for this device or these sizes
                    reason = str(error).splitlines()[0]
                    self.skipped.append({"what": what, "backend": backend, "q": new, "reason": reason})

    def _append(self) -> None:
        point, layer = self.point, self.point.target
        k, v = (self._states(layer, layer.shape.kv_heads, point.new) for _ in range(2))
        needed = 2 * 2 * k.numel()  # written; what is read was made just before
        # each call elsewhere in the rows, as tokens go on: a fixed place would stay in the L2 cache
        starts = [torch.randint(point.committed, (point.batch,), device="cuda") for _ in range(sets_for(needed))]
        self._measure("kv_append", layer, point.new, needed, lambda i: kv_append(*layer.kv(i), k, v, starts[i]))

    def _choosing(self) -> None:
        point, scores, layer = self.point, self.point.scores, self.point.target
        table = point.batch * point.context * 4

        def choose(i: int) -> object:
            pair = scores[2 * i], scores[2 * i + 1]
            return topk_select(*pair, point.lengths, point.quota, SINKS, WINDOW, point.budget)

        def topk(i: int) -> object:
            return scores[i].topk(point.budget, sorted=False)

        self._measure("topk_select", layer, 0, 2 * table, choose)
        self._measure("torch.topk", layer, 0, table, topk)  # one tier of the two, and unsorted

    def _scoring(self, spread: bool) -> None:
        """Scoring of both models, and with selection after it; spread heads read the most keys, others the least."""
        point, target, draft = self.point, self.point.target, self.point.draft
        by_draft, by_target = torch.zeros(2, point.batch, point.context, device="cuda")
        score_draft = self._scorer(draft, DRAFT_SCORE_LAYERS, point.gamma, spread, by_draft)
        score_target = self._scorer(target, TARGET_SCORE_LAYERS, 1, spread, by_target)
        draft_bytes = DRAFT_SCORE_LAYERS * draft.score_bytes(spread)
        target_bytes = TARGET_SCORE_LAYERS * target.score_bytes(spread)

        def select(i: int) -> object:
            by_draft.zero_()
            by_target.zero_()
            score_draft(i)
            score_target(i)
            return topk_select(by_draft, by_target, point.lengths, point.quota, SINKS, WINDOW, point.budget)

        ending = "" if spread else "_grouped"
        self._measure(f"srh_score{ending}", target, 1, target_bytes, score_target)
        self._measure(f"srh_score{ending}", draft, point.gamma, draft_bytes, score_draft)
        self._measure(f"select{ending}", target, point.gamma, target_bytes + draft_bytes, select)

    def _scorer(self, layer: Layer, layers: int, queries: int, spread: bool, out: torch.Tensor) -> Call:
        """Adds the scores of `layers` layers to `out`, each layer a copy of its own."""
        heads, counts, lengths = layer.kv_heads(spread), self.point.rows(queries), self.point.lengths
        q = self._states(layer, queries, len(heads))

        def call(i: int) -> None:
            for j in range(layers):
                srh_score(out, q, layer.kv(i * layers + j)[0], heads, lengths, counts, layer.scale)

        return call
