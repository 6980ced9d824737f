"""GenerationStats: what one call of generate did, and the recorder that collects it without host synchronisations."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of one call of `generate`.

    A step of a row is one speculative step in which the row was not finished yet.

    Args:
        num_assistant_tokens: gamma.
        committed: tokens kept in each step of each row, the target's own token included.
        drafted: drafted tokens that could have been kept, per row.
        kv_tokens_read: cached and new tokens that verification attended to, per row, summed over steps, mean of layers.
        kv_tokens_full: the same had it attended to the whole row.
        kv_bytes_per_token: bytes of keys and values of one token in the target's cache, all layers.
        draft_calls: forwards of the draft in the decode loop, each over the whole batch.
        target_calls: verification forwards, each over the whole batch.
        seconds: wall time by phase: `prefill`, `draft`, `select` (scoring included), `verify`, `accept`.
        backend: what ran the steps.
        options: the call's `DustinConfig` as a dict.
    """

    num_assistant_tokens: int
    committed: list[list[int]]
    drafted: list[int]
    kv_tokens_read: list[float]
    kv_tokens_full: list[float]
    kv_bytes_per_token: int
    draft_calls: int
    target_calls: int
    seconds: dict[str, float]
    backend: str
    options: dict[str, Any]

    @property
    def new_tokens(self) -> list[int]:
        """New tokens of each row."""
        return [sum(row) for row in self.committed]

    @property
    def tau_per_row(self) -> list[float]:
        """Mean tokens kept per step of each row, the target's own token included (the paper's tau)."""
        return [sum(row) / len(row) if row else 0.0 for row in self.committed]

    @property
    def tau(self) -> float:
        """Mean tokens kept per step over all steps of all rows."""
        return sum(self.new_tokens) / max(1, sum(len(row) for row in self.committed))

    @property
    def histogram(self) -> dict[int, int]:
        """How many steps kept 1, 2, ... gamma + 1 tokens."""
        return dict(sorted(Counter(n for row in self.committed for n in row).items()))

    @property
    def kv_read_share_per_row(self) -> list[float]:
        """Share of the row's KV cache that verification read."""
        return [read / full if full else 0.0 for read, full in zip(self.kv_tokens_read, self.kv_tokens_full)]

    @property
    def kv_read_share(self) -> float:
        """Share of the batch's KV cache that verification read."""
        return sum(self.kv_tokens_read) / max(1.0, sum(self.kv_tokens_full))

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of keys and values that verification read."""
        return round(sum(self.kv_tokens_read) * self.kv_bytes_per_token)

    @property
    def kv_bytes_full(self) -> int:
        """Bytes of keys and values that full verification would have read in the same steps."""
        return round(sum(self.kv_tokens_full) * self.kv_bytes_per_token)

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures, ready for JSON."""
        derived = ("new_tokens", "tau_per_row", "tau", "histogram", "kv_read_share_per_row", "kv_read_share")
        return {**self.__dict__, **{name: getattr(self, name) for name in derived}}


class _Clock:
    """Wall time by phase: the host clock on CPU, events on CUDA, so that timing costs no synchronisation there."""

    def __init__(self, device: torch.device):
        self.cuda = device.type == "cuda"
        self.marks: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = self.now()
        yield
        self.marks.append((name, begin, self.now()))

    def seconds(self) -> dict[str, float]:
        if self.cuda:
            torch.cuda.synchronize()
        total: dict[str, float] = {}
        for name, begin, end in self.marks:
            spent = begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
            total[name] = total.get(name, 0.0) + spent
        return total


@dataclass
class StatsRecorder:
    """Collects device tensors step by step; `finish` brings them to the host once."""

    device: torch.device
    draft_calls: int = 0
    _steps: list[tuple[torch.Tensor, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = _Clock(self.device)

    def record(
        self, committed: torch.Tensor, drafted: torch.Tensor, read: torch.Tensor, full: torch.Tensor, gamma: int
    ) -> None:
        """One step: `[B]` tensors of tokens kept, drafted, and attended to (`read`) or attendable (`full`)."""
        active = committed > 0
        self.draft_calls += gamma
        self._steps.append((committed, drafted * active, read * active, full * active))

    def finish(self, **fields: Any) -> GenerationStats:
        """The statistics; `fields` are those of `GenerationStats` that were not recorded here."""
        committed, drafted, read, full = (torch.stack(column).T.tolist() for column in zip(*self._steps))
        return GenerationStats(
            committed=[[n for n in row if n > 0] for row in committed],
            drafted=[sum(row) for row in drafted],
            kv_tokens_read=[sum(row) for row in read],
            kv_tokens_full=[sum(row) for row in full],
            draft_calls=self.draft_calls,
            target_calls=len(self._steps),
            seconds=self.clock.seconds(),
            **fields,
        )
