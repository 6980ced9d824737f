"""The memory that captured graphs share, on a device that only counts what uses it."""

from contextlib import nullcontext

import pytest
import torch

from dustin_hf.pool import Pool

DEVICE = torch.device("cpu")


@pytest.fixture
def handles(monkeypatch):
    """Handles of graph memory in the order of their use; like torch, none is taken up again after its last graph."""
    used, counts, streams = [], {}, []

    class Graph:
        def __del__(self):
            counts[self.handle] -= 1

    class Capture:
        def __init__(self, graph, pool, stream, capture_error_mode):
            assert capture_error_mode == "thread_local" and stream == DEVICE
            self.graph, self.pool = graph, pool

        def __enter__(self):
            assert counts.get(self.pool) != 0, "it->second->use_count > 0 INTERNAL ASSERT FAILED"
            counts[self.pool] = counts.get(self.pool, 0) + 1
            self.graph.handle = self.pool
            used.append(self.pool)

        def __exit__(self, *exc_info):
            pass

    names = iter(range(100))
    for name, fake in {
        "CUDAGraph": Graph,
        "graph": Capture,
        "graph_pool_handle": lambda: next(names),
        "device": lambda device: nullcontext(),
        "Stream": lambda device: device,
        "current_stream": lambda device: "mine",
        "set_stream": streams.append,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr("dustin_hf.pool._streams", {})
    yield used
    assert set(streams) <= {"mine"}


def capture(pool):
    with pool.captured(DEVICE) as graph:
        pass
    return graph


def test_graphs_share_memory(handles):
    pool = Pool()
    first, second = capture(pool), capture(pool)
    del first
    third = capture(pool)
    assert handles == [0, 0, 0]
    del second, third


def test_captured_again_after_the_last_graph_has_gone(handles):
    """Later shapes ran op by op: torch refused memory whose graphs had gone to make room."""
    pool = Pool()
    graphs = [capture(pool), capture(pool)]
    graphs.clear()
    again = [capture(pool), capture(pool)]
    assert handles == [0, 0, 1, 1]
    again.clear()


def test_a_failed_capture_uses_nothing(handles):
    pool = Pool()
    with pytest.raises(RuntimeError, match="not permitted"), pool.captured(DEVICE):
        raise RuntimeError("operation not permitted when stream is capturing")
    graph = capture(pool)
    assert handles == [0, 1]
    del graph
