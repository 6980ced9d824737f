"""Both twins of every op against loops that are slower still; NaN-poisoned memory; awkward shapes.

The Triton kernels run under the interpreter, in float32 and float16; on a GPU they are compiled, bfloat16 too.
"""

import math
from pathlib import Path

import pytest
import torch
from kernel_cases import DEVICE, DTYPES, OPS, literal_attention, ops, poisoned_memory, queries, storage  # noqa: F401

from dustin_hf.testing import assert_close

SHAPES = [  # new, q_heads, kv_heads, dim, starts
    pytest.param(1, 4, 4, 64, (0, 5, 63), id="L1-G1-D64"),
    pytest.param(5, 12, 2, 16, (63, 1, 20), id="L5-G6-D16"),
    pytest.param(2, 14, 2, 8, (-1, 0, 30), id="L2-G7-negative-start"),
    pytest.param(4, 3, 3, 80, (17,), id="L4-G1-D80"),
]


@pytest.mark.parametrize(
    "new, q_heads, kv_heads, dim, starts",
    [
        *SHAPES,
        pytest.param(50, 12, 2, 8, (-3, 0, 19), id="L50-G6-in-three-parts"),
        pytest.param(22, 6, 1, 8, (40,), id="L22-G6-in-two-parts"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_full_attention(ops, new, q_heads, kv_heads, dim, starts, dtype):
    batch, start = len(starts), torch.tensor(starts)
    k, v = storage(batch, kv_heads, 70, dim, dtype)
    q = queries(batch, new, q_heads, dim, dtype)
    o, lse = ops.full_attention(q, k, v, start, dim**-0.5)
    expected, expected_lse = literal_attention(q, k, v, lambda b, h, i: list(range(starts[b] + i + 1)), dim**-0.5)
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert_close("o", expected, o)
    empty = expected_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty) and not o[empty].any()
    assert_close("lse", expected_lse[~empty], lse[~empty])


@pytest.mark.parametrize("new, q_heads, kv_heads, dim, starts", SHAPES)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("chosen", [0, 1, 9, 16])
def test_sparse_attention(ops, new, q_heads, kv_heads, dim, starts, per_head, chosen):
    batch, start = len(starts), torch.tensor(starts)
    k, v = storage(batch, kv_heads, 70, dim)
    q = queries(batch, new, q_heads, dim)
    generator = torch.Generator().manual_seed(2)
    indices = torch.full((batch, kv_heads if per_head else 1, chosen), -1, dtype=torch.int32)
    for b, length in enumerate(starts):
        for h in range(indices.shape[1]):
            picked = torch.randperm(max(length, 0), generator=generator)[: max(0, chosen - 2)]
            # unused places between used ones
            indices[b, h, torch.randperm(chosen, generator=generator)[: len(picked)]] = picked.int()

    def slots(b, h, i):
        own = [s for s in range(starts[b], starts[b] + i + 1) if s >= 0]
        return [s for s in indices[b, h if per_head else 0].tolist() if s >= 0] + own

    o, lse = ops.sparse_attention(q, k, v, indices, start, dim**-0.5)
    expected, expected_lse = literal_attention(q, k, v, slots, dim**-0.5)
    empty = expected_lse == -math.inf
    assert_close("o", expected, o)
    assert torch.equal(lse == -math.inf, empty) and not o[empty].any()
    assert_close("lse", expected_lse[~empty], lse[~empty])


@pytest.mark.parametrize("dim", [16, 32, 64])
@pytest.mark.parametrize("group", [1, 2, 7, 8])
@pytest.mark.parametrize("gamma", range(9))
def test_small_tiles_p47_p50(ops, gamma, group, dim):
    """P-47, P-50: few queries times small groups; rows of one key; against torch's own attention."""
    start = torch.tensor([0, 1, 33])
    k, v = storage(3, 2, 48, dim)
    q = queries(3, gamma + 1, 2 * group, dim)
    visible = torch.arange(48) <= (start[:, None] + torch.arange(gamma + 1))[..., None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(1, 2), k, v, attn_mask=visible[:, None], enable_gqa=True
    ).transpose(1, 2)
    indices = torch.where(torch.arange(40) < start[:, None], torch.arange(40), -1)[:, None].int()
    for o, _ in (
        ops.full_attention(q, k, v, start, dim**-0.5),
        ops.sparse_attention(q, k, v, indices, start, dim**-0.5),
    ):
        assert_close("o", expected, o)


def test_canaries_around_ragged_writes_p43(ops):
    """P-43: nothing is written outside the rows, however the blocks lie at their edges."""
    surrounding = [torch.full((5, 2, 14, 4), 777.0) for _ in range(2)]
    keys, values = (x[1:4, :, 2:12] for x in surrounding)
    k, v = storage(3, 2, 4, 4, seed=9)
    for start in ([-4, 3, 9], [-1, 6, 12], [0, 7, 10]):
        ops.kv_append(keys, values, k, v, torch.tensor(start))
    for x in surrounding:
        outside = torch.ones(5, 14, dtype=torch.bool)
        outside[1:4, 2:12] = False
        assert (x.transpose(1, 2)[outside] == 777.0).all()
    out = ops.topk_select(torch.rand(3, 9), torch.rand(3, 9), torch.tensor([0, 3, 9]), torch.tensor([0, 1, 4]), 1, 1, 6)
    assert out.shape == (3, 6) and out.max() < 9 and out.min() == -1


def test_all_slots_chosen_is_full_attention(ops):
    """The top identity: sparse over everything equals full."""
    k, v = storage(3, 2, 70, 16)
    start = torch.tensor([0, 13, 60])
    q = queries(3, 5, 14, 16)
    slots = torch.arange(60).expand(3, 1, -1)
    indices = torch.where(slots < start[:, None, None], slots, -1).int()
    full, sparse = ops.full_attention(q, k, v, start, 0.25), ops.sparse_attention(q, k, v, indices, start, 0.25)
    for name, a, b in zip(("o", "lse"), full, sparse):
        assert_close(name, a, b)


def test_stale_slots_do_not_matter(ops):
    """What lies behind a row's new tokens changes nothing, however large."""
    k, v = storage(2, 2, 40, 8)
    start = torch.tensor([7, 20])
    q = queries(2, 3, 4, 8)
    indices = torch.tensor([[[1, 3, 5]], [[0, 19, 7]]], dtype=torch.int32)
    before = ops.full_attention(q, k, v, start, 1.0), ops.sparse_attention(q, k, v, indices, start, 1.0)
    for b, length in enumerate((10, 23)):
        k[b, :, length:] = v[b, :, length:] = 1e30
    after = ops.full_attention(q, k, v, start, 1.0), ops.sparse_attention(q, k, v, indices, start, 1.0)
    assert all(torch.equal(x, y) for a, b in zip(before, after) for x, y in zip(a, b))


def test_large_scores_in_half_precision_p44(ops):
    """P-44: keys with large biases (Qwen2) overflow a half-precision product; scores are float32 inside."""
    k, v = storage(1, 2, 30, 64, torch.float16)
    q = queries(1, 3, 12, 64, torch.float16)
    k, q = k + 300, q + 30
    start, indices = torch.tensor([20]), torch.arange(20, dtype=torch.int32).view(1, 1, -1)
    for o, _ in (
        ops.full_attention(q, k, v, start, 0.125),
        ops.sparse_attention(q, k, v, indices, start, 0.125),
    ):
        assert o.isfinite().all()
        expected = ops.full_attention(q.double().float(), k.float(), v.float(), start, 0.125)[0]
        assert_close("o", expected, o)


def literal_score(q, k, kv_heads, lengths, counts, scale):
    scores = torch.zeros(k.shape[0], k.shape[2])
    for b, (length, count) in enumerate(zip(lengths, counts)):
        for i in range(count):
            for h, kv_head in enumerate(kv_heads):
                weights = (k[b, kv_head, :length].float() @ q[b, i, h].float() * scale).softmax(0)
                scores[b, :length] += weights
    return scores


@pytest.mark.parametrize("group", [1, 2, 7])
@pytest.mark.parametrize("counts", [(3, 3, 3), (0, 1, 3)])
def test_srh_score(ops, group, counts):
    lengths, heads = (1, 13, 30), [0, 2 * group - 1, group, 1 % group]
    k, _ = storage(3, 2, 32, 16)
    q = queries(3, 3, len(heads), 16)
    kv_heads = torch.tensor(heads) // group
    scores = torch.zeros(3, 32)
    ops.srh_score(scores, q, k, kv_heads, torch.tensor(lengths), torch.tensor(counts), 0.25)
    assert_close("scores", literal_score(q, k, kv_heads, lengths, counts, 0.25), scores)
    assert scores.sum(1).tolist() == pytest.approx([c * len(heads) for c in counts], rel=1e-5)
    assert not scores[0, 1:].any() and not scores[1, 13:].any()


@pytest.mark.parametrize("kv_heads", [(1, 0, 1, 3), (3, 1, 3), (2,), (0, 0, 0, 0, 0), (4, 3, 2, 1, 0, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_srh_score_adds_up_in_place(ops, kv_heads, dtype):
    """Any choice of key/value heads; what stood in `out` stays in the sum, and all that stands behind a row's end."""
    lengths, counts = (37, 0, 90, 64), (2, 2, 0, 1)
    k, _ = storage(4, 5, 90, 24, dtype)
    q = queries(4, 2, len(kv_heads), 24, dtype)
    expected = literal_score(q, k, kv_heads, lengths, counts, 0.2)
    for b, length in enumerate(lengths):
        k[b, :, length:] = float("nan")
    before = torch.rand(4, 90, generator=torch.Generator().manual_seed(4))
    out = before.clone()
    ops.srh_score(out, q, k, torch.tensor(kv_heads), torch.tensor(lengths), torch.tensor(counts), 0.2)
    assert_close("scores", before + expected, out)
    for b, length in enumerate(lengths):
        assert torch.equal(out[b, length:], before[b, length:])
    assert torch.equal(out[2], before[2])


@pytest.mark.parametrize("n_queries, kv_heads", [(1, (0, 1)), (5, (1, 1, 0, 1, 0, 1, 1))])
def test_srh_score_of_many_tiles(ops, n_queries, kv_heads):
    """Rows of several programs; more rows of the tile than the least; tall scores that drift along the row."""
    lengths, counts = (4500, 2048, 2049), (n_queries, 1, n_queries)
    k, _ = storage(3, 2, 4503, 16)
    k += torch.linspace(-3, 3, 4503)[:, None]
    q = queries(3, n_queries, len(kv_heads), 16)
    out = torch.zeros(3, 4503)
    ops.srh_score(out, q, k, torch.tensor(kv_heads), torch.tensor(lengths), torch.tensor(counts), 0.5)
    assert_close("scores", literal_score(q, k, kv_heads, lengths, counts, 0.5), out)


def test_srh_score_of_an_empty_row(ops):
    k, _ = storage(2, 2, 8, 4)
    one, scores = torch.ones(2, dtype=torch.long), torch.zeros(2, 8)
    ops.srh_score(scores, queries(2, 1, 2, 4), k, torch.tensor([0, 1]), torch.tensor([0, 3]), one, 1.0)
    assert not scores[0].any() and scores[1].sum() == pytest.approx(2)


def literal_select(draft, target, length, m, sinks, window, k):
    chosen = {i for i in range(length) if i < sinks or i >= length - window}
    for scores, quota in ((draft, m), (target, k)):
        rest = sorted((i for i in range(length) if i not in chosen), key=lambda i: (-scores[i], i))
        chosen.update(rest[: min(quota, k - len(chosen))])
    return sorted(chosen)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    "sinks, window, k", [(0, 0, 1), (2, 3, 6), (2, 3, 5), (4, 16, 21), (0, 5, 40), (3, 0, 9), (0, 0, 7)]
)
def test_topk_select(ops, ties, sinks, window, k):
    lengths = [0, 1, 2, 5, 6, 7, 20, 21, 40, 50]
    generator = torch.Generator().manual_seed(3)
    draft, target = torch.rand(2, len(lengths), 50, generator=generator)
    if ties:
        draft, target = (draft * 3).floor(), (target * 2).floor()
    for m in (1, 4, 100):
        quota = torch.tensor([m if i % 3 else 0 for i in range(len(lengths))])
        out = ops.topk_select(draft, target, torch.tensor(lengths), quota, sinks, window, k)
        assert out.shape == (len(lengths), k) and out.dtype == torch.int32
        for row, length in enumerate(lengths):
            expected = literal_select(
                draft[row].tolist(), target[row].tolist(), length, quota[row].item(), sinks, window, k
            )
            assert out[row].tolist() == expected + [-1] * (k - len(expected))
            assert len(expected) == min(length, k)


def _period(scores):  # one group of the kernel's has all large scores
    return torch.where(torch.arange(scores.shape[1]) % 64 == 5, scores + 1, scores)


SCORES = [  # of both tiers, from uniform random ones
    pytest.param(lambda draft, target: (draft, target), id="random"),
    pytest.param(lambda draft, target: (draft, draft), id="one-for-both"),
    pytest.param(lambda draft, target: (draft**40, target * 1e-30), id="skewed-and-tiny"),
    pytest.param(lambda draft, target: ((draft * 4).floor(), (target * 3).floor()), id="ties"),
    pytest.param(lambda draft, target: ((draft * 2000).floor(), (target * 1000).floor()), id="some-ties"),
    pytest.param(lambda draft, target: (_period(draft), _period(target)), id="period"),
    pytest.param(lambda draft, target: (draft, _period(target)), id="period-of-one"),
    pytest.param(lambda draft, target: (torch.ones_like(draft), torch.ones_like(target)), id="equal"),
    pytest.param(lambda draft, target: (torch.zeros_like(draft), torch.zeros_like(target)), id="zero"),
    pytest.param(lambda draft, target: (torch.zeros_like(draft), target), id="zero-drafts"),
]


@pytest.mark.parametrize("scores_of", SCORES)
@pytest.mark.parametrize("sinks, window, k, m", [(4, 12, 32, 9), (0, 0, 20, 20), (1, 600, 700, 0)])
def test_topk_select_of_long_rows(ops, scores_of, sinks, window, k, m):
    """Rows of many programs, with any scores; rows shorter than k, and without a token."""
    lengths = torch.tensor([9000, 3000, 15, 0])
    draft, target = scores_of(*torch.rand(2, 4, 9000, generator=torch.Generator().manual_seed(5)))
    out = ops.topk_select(draft, target, lengths, torch.tensor([m, 0, m, m]), sinks, window, k)
    for row, length in enumerate(lengths.tolist()):
        quota = m if row != 1 else 0
        expected = literal_select(draft[row].tolist(), target[row].tolist(), length, quota, sinks, window, k)
        assert out[row].tolist() == expected + [-1] * (k - len(expected))


@pytest.mark.parametrize("k", [4097, 8192, 8193])
def test_topk_select_of_large_budgets(ops, k):
    """As large as a tile may be, and larger."""
    lengths = torch.tensor([9500, k])
    draft, target = torch.rand(2, 2, 9500, generator=torch.Generator().manual_seed(7))
    out = ops.topk_select(draft, target, lengths, torch.tensor([3000, 0]), 4, 16, k)
    for row, (length, m) in enumerate(zip(lengths.tolist(), (3000, 0))):
        assert out[row].tolist() == literal_select(draft[row].tolist(), target[row].tolist(), length, m, 4, 16, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_topk_select_of_other_dtypes(ops, dtype):
    draft, target = torch.rand(2, 2, 700, generator=torch.Generator().manual_seed(6)).to(dtype)
    out = ops.topk_select(draft, target, torch.tensor([700, 444]), torch.tensor([5, 9]), 1, 4, 24)
    for row, (length, m) in enumerate(((700, 5), (444, 9))):
        assert out[row].tolist() == literal_select(draft[row].tolist(), target[row].tolist(), length, m, 1, 4, 24)


def test_kv_append(ops):
    keys, values = storage(3, 2, 10, 4)
    before = keys.clone(), values.clone()
    k, v = storage(3, 2, 3, 4, seed=9)
    start = torch.tensor([-2, 4, 8])
    ops.kv_append(keys, values, k, v, start)
    for stored, old, new in ((keys, before[0], k), (values, before[1], v)):
        expected = old.clone()
        for b in range(3):
            for i in range(3):
                if 0 <= start[b] + i < 10:
                    expected[b, :, start[b] + i] = new[b, :, i]
        assert torch.equal(stored, expected)


@pytest.mark.parametrize(
    "op, args, message",
    [
        ("kv_append", ((1, 2, 8, 4), (1, 2, 8, 4), (1, 3, 1, 4), (1, 3, 1, 4), (1,)), "k must be"),
        ("kv_append", ((1, 2, 8, 4), (1, 2, 7, 4), (1, 2, 1, 4), (1, 2, 1, 4), (1,)), "must agree"),
        ("full_attention", ((1, 1, 5, 4), (1, 2, 8, 4), (1, 2, 8, 4), (1,), 1.0), "multiple of H"),
        ("full_attention", ((1, 1, 4, 4), (1, 2, 8, 4), (1, 2, 8, 4), (2,), 1.0), "start must"),
        ("full_attention", ((1, 1, 4, 4), (1, 2, 8, 4), (1, 2, 8, 5), (1,), 1.0), "one shape"),
        ("sparse_attention", ((1, 1, 4, 4), (1, 2, 8, 4), (1, 2, 8, 4), (1, 3, 5), (1,), 1.0), "indices must"),
        ("srh_score", ((1, 8), (1, 1, 4, 4), (1, 2, 8, 5), (4,), (1,), (1,), 1.0), "q must"),
        ("srh_score", ((1, 8), (1, 1, 4, 4), (1, 2, 8, 4), (3,), (1,), (1,), 1.0), "kv_heads must"),
        ("srh_score", ((1, 9), (1, 1, 4, 4), (1, 2, 8, 4), (4,), (1,), (1,), 1.0), "out must"),
        ("topk_select", ((1, 8), (1, 9), (1,), (1,), 1, 1, 4), "one shape"),
        ("topk_select", ((1, 8), (1, 8), (2,), (2,), 1, 1, 4), "lengths and draft_quota"),
        ("topk_select", ((1, 8), (1, 8), (1,), (1,), 3, 2, 4), "protected tokens, 3 sinks"),
    ],
)
def test_wrong_shapes(ops, op, args, message):
    tensors = [torch.zeros(a, dtype=torch.long if len(a) == 1 else None) if isinstance(a, tuple) else a for a in args]
    with pytest.raises(ValueError, match=message):
        getattr(ops, op)(*tensors)


def test_assert_close_can_fail():
    x = torch.randn(4, 5)
    assert_close("same", x, x.clone())
    for bad, message in ((x + 1e-3, "relative RMS"), (x[:3], "shape"), (x * float("nan"), "NaN")):
        with pytest.raises(AssertionError, match=message):
            assert_close("bad", x, bad)


def test_each_op_is_a_folder_with_both_twins():
    root = Path(__file__).parents[1] / "kernels"
    found = sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("_"))
    assert tuple(found) == OPS
    for op in found:
        assert {"__init__.py", "naive.py", "kernel.py"} <= {path.name for path in (root / op).iterdir()}
