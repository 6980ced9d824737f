"""A wrong kernel is not timed: each op against its plain twin, on the first row of a bench point."""

import torch

from dustin_hf.eval.efficiency.inputs import SINKS, WINDOW, Point
from dustin_hf.kernels.full_attention import full_attention, naive_full_attention
from dustin_hf.kernels.sparse_attention import naive_sparse_attention, sparse_attention
from dustin_hf.kernels.srh_score import naive_srh_score, srh_score
from dustin_hf.kernels.topk_select import naive_topk_select, topk_select

# Relative RMS error. Gross errors are looked for here; the tests of the kernels hold the tight tolerances.
LIMIT = 0.02


def check_ops(point: Point) -> dict[str, float]:
    """Relative RMS error of each op at this point, one row against its twin in float32.

    Raises:
        ValueError: if an op is off by more than `LIMIT`.
    """
    shape, (k, v) = point.target.shape, point.target.kv(0)
    scale = point.target.scale
    q = torch.randn(point.batch, point.new, shape.q_heads, shape.head_dim, dtype=torch.bfloat16, device="cuda")
    start, indices = point.lengths, point.indices[0]
    errors = {
        "full_attention": _error(
            naive_full_attention(q[:1], k[:1], v[:1], start[:1], scale)[0], full_attention(q, k, v, start, scale)[0]
        ),
        "sparse_attention": _error(
            naive_sparse_attention(q[:1], k[:1], v[:1], indices[:1], start[:1], scale)[0],
            sparse_attention(q, k, v, indices, start, scale)[0],
        ),
    }
    heads, counts = point.target.kv_heads(spread=True), point.rows(1)
    out, expected = (torch.zeros(rows, point.context, device="cuda") for rows in (point.batch, 1))
    chosen = q[:, :1, point.target.score_heads(spread=True)]
    srh_score(out, chosen, k, heads, start, counts, scale)
    naive_srh_score(expected, chosen[:1], k[:1], heads, start[:1], counts[:1], scale)
    errors["srh_score"] = _error(expected, out)
    first, second, options = point.scores[0], point.scores[1], (SINKS, WINDOW, point.budget)
    slots = topk_select(first, second, start, point.quota, *options)
    right = naive_topk_select(first[:1], second[:1], start[:1], point.quota[:1], *options)
    errors["topk_select"] = float((slots[:1] != right).float().mean())
    for name, error in errors.items():
        if not error <= LIMIT:  # a NaN is no pass
            raise ValueError(f"{name} differs from its plain twin by {error:.3g} (relative), so it is not measured")
    return errors


def _error(expected: torch.Tensor, got: torch.Tensor) -> float:
    expected, got = expected[:1].float(), got[:1].float()
    return ((got - expected).norm() / expected.norm()).item()
