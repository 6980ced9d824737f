"""What the kernel tests share: all ops of one kind, poisoned memory, inputs, and attention one slot at a time."""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# bfloat16 dots come out wrong under the interpreter
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
OPS = (
    "full_attention",
    "kv_append",
    "rms_norm",
    "rope_append",
    "rope_sparse_attention",
    "silu_mul",
    "sparse_attention",
    "srh_score",
    "topk_select",
)


@pytest.fixture(params=["naive", "triton"])
def ops(request):
    """All ops of one kind. Arguments travel to the device and results back, so that tests are written once."""

    def on_device(function):
        def call(*args):
            moved = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]
            out = function(*moved)
            for x, y in zip(args, moved):
                if x is not y and isinstance(x, torch.Tensor):
                    x.copy_(y)  # some work in place
            if out is None:
                return None
            return tuple(x.cpu() for x in out) if isinstance(out, tuple) else out.cpu()

        return call

    functions = {}
    for op in OPS:
        module = importlib.import_module(f"dustin_hf.kernels.{op}.{'naive' if request.param == 'naive' else 'kernel'}")
        functions[op] = on_device(getattr(module, f"{request.param}_{op}"))
    return SimpleNamespace(**functions)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """An output element that is never written is NaN."""
    for name in ("empty", "empty_like"):
        make = getattr(torch, name)

        def poisoned(*args, make=make, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        monkeypatch.setattr(torch, name, poisoned)


def storage(batch, heads, capacity, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, capacity, dim, generator=generator).to(dtype) for _ in range(2)]


def queries(batch, new, heads, dim, dtype=torch.float32):
    return torch.randn(batch, new, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


def literal_attention(q, k, v, slots_of, scale):
    """One query, one head, one slot at a time. `slots_of(b, h, i)` lists what a query sees."""
    batch, new, q_heads, dim = q.shape
    group = q_heads // k.shape[1]
    out, lse = torch.zeros(q.shape), torch.full(q.shape[:3], -math.inf)
    for b in range(batch):
        for i in range(new):
            for h in range(q_heads):
                slots = slots_of(b, h // group, i)
                if slots:
                    scores = torch.stack([q[b, i, h].float() @ k[b, h // group, s].float() for s in slots]) * scale
                    values = torch.stack([v[b, h // group, s].float() for s in slots])
                    out[b, i, h] = scores.softmax(0) @ values
                    lse[b, i, h] = scores.logsumexp(0)
    return out, lse
