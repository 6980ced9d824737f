"""Times of CUDA work: calls captured in one graph over inputs that rotate, and the copy rate that floors come from."""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

REPEATS = 7
WARM_UP_MS = 20.0
# A replay below this is mostly its own launch and the events around it, so that short rotations go round several times.
LEAST_MS = 2.0
COPY_BYTES = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call: the median of all replays of the graph, the fastest and the slowest."""

    median_us: float
    low_us: float
    high_us: float


def check_cuda() -> None:
    """Raise `ValueError` without a CUDA device."""
    if not torch.cuda.is_available():
        raise ValueError("`dustin-hf bench` measures CUDA kernels; no CUDA device was found")


def time_graph(run: Callable[[int], object], rotations: int, repeats: int = REPEATS) -> Timing:
    """Time of one `run(i)`, on the device alone: no launches from Python are in it.

    All `run(0) .. run(rotations - 1)` are called once for compilation, then captured in order in one CUDA graph. The
    caller makes their inputs differ, and enough of them that the L2 cache holds none at its next turn.

    Args:
        run: enqueues the work on input set `i`; fit for capture, so without synchronisation.
        rotations: input sets.
        repeats: timed replays, at least 5.

    Raises:
        ValueError: without a CUDA device, or if `repeats` or `rotations` is too low.
    """
    check_cuda()
    if repeats < 5 or rotations < 1:
        raise ValueError(f"`repeats` must be at least 5 and `rotations` at least 1, got {repeats} and {rotations}")
    for i in range(rotations):
        run(i)
    torch.cuda.synchronize()
    graph, cycles = _capture(run, rotations, 1), 1
    once = min(_intervals_ms(graph.replay, 3))
    if once < LEAST_MS:
        cycles = math.ceil(LEAST_MS / max(once, 0.02))
        del graph  # its memory goes back before the next one asks for more
        graph = _capture(run, rotations, cycles)
    for _ in range(math.ceil(WARM_UP_MS / (once * cycles))):
        graph.replay()
    times = [ms * 1e3 / (cycles * rotations) for ms in _intervals_ms(graph.replay, repeats)]
    return Timing(statistics.median(times), min(times), max(times))


def copy_rate() -> float:
    """Rate of a large device copy in GB/s (1e9 bytes), bytes read plus bytes written, the best of ten.

    Raises:
        ValueError: without a CUDA device.
    """
    check_cuda()
    source = torch.randn(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / min(_intervals_ms(lambda: target.copy_(source), 10)) / 1e6


def _capture(run: Callable[[int], object], rotations: int, cycles: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(cycles):
            for i in range(rotations):
                run(i)
    return graph


def _intervals_ms(work: Callable[[], object], count: int) -> list[float]:
    """Times of `count` runs back to back, after one more that keeps the device busy while they are enqueued.

    Without it, and with a wait after each, a time would hold the launch from Python that the device waits for.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    work()
    for i, event in enumerate(events):
        event.record()
        if i < count:
            work()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in zip(events, events[1:])]
