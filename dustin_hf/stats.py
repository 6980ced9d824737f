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
        seconds: wall time by phase: `prefill`, `draft`, `select` (scoring included), `verify`, `accept`, and
            `capture` where CUDA graphs were made.
        backend: what ran the steps: `"graph"`, `"compiled"` or `"eager"`.
        backend_reason: why that one.
        options: the call's `DustinConfig` as a dict.
        draft_cache: what the draft attended to: `"full"`, `"streaming"` or `"sparse"`; None where no model drafts.
        profile: which one was used: `"given"`, `"shipped"` or `"default"`.
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
    backend_reason: str
    options: dict[str, Any]
    draft_cache: str | None
    profile: str

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


class Clock:
    """Wall time by phase: the host clock on CPU, events on CUDA, so that timing costs no synchronisation there.

    Args:
        device: whose work is timed.
        captured: whether the work is being captured: then the marks speak of the latest replay.
    """

    def __init__(self, device: torch.device, captured: bool = False):
        self.device, self.captured = device, captured
        self.marks: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """The present moment, to be compared with a later one once the device is done."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, external=self.captured)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute the time spent inside to a phase."""
        begin = self.now()
        yield
        self.marks.append((name, begin, self.now()))

    def seconds(self) -> dict[str, float]:
        """Seconds of each phase so far. On CUDA the device must be done with them."""
        on_cuda = self.device.type == "cuda"
        total: dict[str, float] = {}
        for name, begin, end in self.marks:
            spent = begin.elapsed_time(end) / 1e3 if on_cuda else end - begin
            total[name] = total.get(name, 0.0) + spent
        return total


@dataclass
class StatsRecorder:
    """Collects what each step reports, on the host.

    Args:
        device: of the steps.
        draft_calls: forwards of the draft so far.
        replayed: seconds of each phase in replayed steps.
    """

    device: torch.device
    draft_calls: int = 0
    replayed: Counter[str] = field(default_factory=Counter)
    _steps: list[tuple[list[int], list[int], list[float], list[float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock(self.device)

    def record(
        self, committed: list[int], drafted: list[int], read: list[float], full: list[float], gamma: int
    ) -> None:
        """One step: of each row, tokens kept, drafted, and attended to (`read`) or attendable (`full`)."""
        self.draft_calls += gamma
        self._steps.append((committed, drafted, read, full))

    def finish(self, **fields: Any) -> GenerationStats:
        """The statistics; `fields` are those of `GenerationStats` that were not recorded here."""
        # only steps in which the row was not finished yet count for it
        if self.device.type == "cuda":
            # of the whole device would end a capture in another thread, and that call with an error
            torch.cuda.current_stream(self.device).synchronize()
        seconds = Counter(self.clock.seconds()) + self.replayed
        batch = len(self._steps[0][0]) if self._steps else 0
        rows = [
            [figures for figures in (tuple(column[b] for column in step) for step in self._steps) if figures[0] > 0]
            for b in range(batch)
        ]
        return GenerationStats(
            committed=[[int(step[0]) for step in row] for row in rows],
            drafted=[int(sum(step[1] for step in row)) for row in rows],
            kv_tokens_read=[sum(step[2] for step in row) for row in rows],
            kv_tokens_full=[sum(step[3] for step in row) for row in rows],
            draft_calls=self.draft_calls,
            target_calls=len(self._steps),
            seconds=dict(seconds),
            **fields,
        )
