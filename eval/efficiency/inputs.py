"""Random inputs of one bench point: enough copies of everything that the L2 cache is cold at each call."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from dustin_hf.eval.efficiency.shapes import Shape

# Bytes that the input sets of one measurement have together at least, several times the L2 cache of any GPU (50 MB on
# an H200), and the most sets, for tiny inputs that would never get there.
COLD_BYTES = 400_000_000
MOST_SETS = 200
# Keys and values of all copies may take this much of the device, for the target's layer and the draft's.
TARGET_BYTES = 24_000_000_000
DRAFT_BYTES = 8_000_000_000
SINKS, WINDOW, DRAFT_SHARE = 4, 16, 0.75
TARGET_SCORE_LAYERS, DRAFT_SCORE_LAYERS, SCORE_HEADS = 1, 3, 4


def sets_for(touched: int) -> int:
    """Input sets of a call that touches so many bytes of each, for `COLD_BYTES` in all."""
    return min(MOST_SETS, max(2, math.ceil(COLD_BYTES / touched)))


@dataclass(frozen=True, slots=True)
class Layer:
    """Keys and values of one attention layer, several independent copies; they stand for the layers of a model.

    Args:
        shape: of the model.
        keys, values: of each copy, `[B, H, context, D]` bfloat16.
    """

    shape: Shape
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @classmethod
    def random(cls, shape: Shape, context: int, batch: int, touched: int, most_bytes: int, least: int) -> "Layer":
        """As many copies as calls that touch `touched` bytes need and `most_bytes` allow, but `least` in any case.

        Raises:
            ValueError: if `least` copies do not fit the device.
        """
        size = (batch, shape.kv_heads, context, shape.head_dim)
        one = 4 * math.prod(size)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        copies = max(least, min(sets_for(touched), min(most_bytes, free // 2) // one))
        if copies * one > 0.9 * free:
            raise ValueError(
                f"--context {context} with --batch {batch} needs {copies * one / 1e9:.1f} GB for {copies} layers of "
                f"{shape.name}, and {free / 1e9:.1f} GB are free"
            )

        def storage() -> list[torch.Tensor]:
            return [torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(copies)]

        return cls(shape, storage(), storage())

    @property
    def scale(self) -> float:
        """Factor of the attention scores."""
        return self.shape.head_dim**-0.5

    def kv(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that input set `i` uses."""
        return self.keys[i % len(self.keys)], self.values[i % len(self.values)]

    def score_heads(self, spread: bool) -> list[int]:
        """Query heads to score: spread over all, so most key/value heads are read; or neighbours, the fewest."""
        count = min(SCORE_HEADS, self.shape.q_heads)
        return [i * self.shape.q_heads // count if spread else i for i in range(count)]

    def kv_heads(self, spread: bool) -> torch.Tensor:
        """Key/value heads of `score_heads`, `[NH]`."""
        return torch.tensor([head // self.shape.group for head in self.score_heads(spread)], device="cuda")

    def score_bytes(self, spread: bool) -> int:
        """Bytes of the keys that one layer's scoring has to read: each key/value head once."""
        distinct = len({head // self.shape.group for head in self.score_heads(spread)})
        return self.keys[0].numel() // self.shape.kv_heads * distinct * 2


class Point:
    """One context and batch of a target and its draft: every row full, the new tokens being its last `gamma + 1`.

    Args:
        target, draft: the two shapes.
        context: tokens in each row, the new ones included.
        batch: rows.
        gamma: drafted tokens per step.
        budget: slots that verification attends to.

    Raises:
        ValueError: if the budget does not fit the context, or the storage not the device.
    """

    def __init__(self, target: Shape, draft: Shape, context: int, batch: int, gamma: int, budget: int):
        self.committed = context - gamma - 1
        if not SINKS + WINDOW <= budget <= self.committed:
            raise ValueError(
                f"--budget must be {SINKS + WINDOW} (the protected tokens) to {self.committed} "
                f"(context {context} less the new tokens), got {budget}"
            )
        self.context, self.batch, self.gamma, self.budget, self.new = context, batch, gamma, budget, gamma + 1
        self.target = Layer.random(target, context, batch, attention_bytes(target, batch, budget), TARGET_BYTES, 1)
        self.draft = Layer.random(
            draft, context, batch, attention_bytes(draft, batch, budget), DRAFT_BYTES, DRAFT_SCORE_LAYERS
        )
        self.lengths = self.rows(self.committed)
        self.quota = self.rows(round(DRAFT_SHARE * budget))

    def rows(self, value: int) -> torch.Tensor:
        """`value` for each row, `[B]`, of the type that lengths have in a cache."""
        return torch.full((self.batch,), value, dtype=torch.int64, device="cuda")

    @cached_property
    def indices(self) -> list[torch.Tensor]:
        """Other slots for each input set, `[B, 1, k]` int32 ascending; scattered at random, the worst for a gather."""
        few = min(attention_bytes(layer.shape, self.batch, self.budget) for layer in (self.target, self.draft))
        return [
            torch.rand(self.batch, self.committed, device="cuda")
            .topk(self.budget)
            .indices.sort()
            .values[:, None]
            .to(torch.int32)
            for _ in range(sets_for(few))
        ]

    @cached_property
    def scores(self) -> list[torch.Tensor]:
        """Two for each input set, `[B, context]` float32: a few high ones and a long tail, as attention has."""
        size = (self.batch, self.context)
        pairs = sets_for(2 * 4 * self.batch * self.context)
        return [(3 * torch.randn(size, device="cuda")).softmax(-1) for _ in range(2 * pairs)]


def attention_bytes(shape: Shape, batch: int, slots: int) -> int:
    """Keys and values of `slots` tokens in each row, one bfloat16 layer. Queries and outputs stay in the L2 cache."""
    return 4 * batch * slots * shape.kv_heads * shape.head_dim
