"""What fewer heads cost, and what sets of their own for a few groups of layers would gain: further searches."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dustin_hf.profiling.recovery import Objective, history_set
from dustin_hf.profiling.search import SearchResult, SearchSettings, search
from dustin_hf.profiling.traces import Progress, TraceSet

# Target heads in one layer, and draft layers of four heads each: the paper's 4 + 12 and less (ours).
HEADS = ((1, 1), (1, 2), (2, 2), (4, 3))
GROUPS = (2, 4)


def prices(
    traces: TraceSet,
    folder: str | Path,
    settings: SearchSettings,
    searched: Sequence[int],
    held_out: Sequence[int],
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """Attention recovery on held-out samples with other numbers of heads, and with a set for each group of layers.

    Every line is a search of its own (Algorithm 1), on the same samples. Layer groups are equal parts of the depth; for
    each, heads and splits are those that recover the attention of its own layers best, and its oracle is the best set
    for them. A group's share in the mean is its share of the layers.

    Args:
        traces: recorded with target candidates of 1, 2 and 4 heads.
        folder: of the study; each search has a folder in it, so that all of this can be interrupted.
        settings: of the study's own search, whose candidates have 4 heads.
        searched: samples to search on.
        held_out: samples to measure on.
        device: where sets are chosen.
        progress: called with the phase, and how much of it is done.

    Returns:
        `heads` ("1 + 4" and so on, target and draft heads) and `groups` ("1", "2", "4", as far as there are layers),
        each to budget, to `hybrid` and `oracle`.
    """
    heads = {}
    for target_heads, draft_layers in HEADS:
        fewer = tuple(i for i, (_, chosen) in enumerate(traces.settings.target) if len(chosen) == target_heads)
        candidates = settings.target if target_heads == 4 else fewer
        name = f"{target_heads} + {4 * draft_layers}"
        place, told = Path(folder) / f"heads{name.replace(' ', '')}", progress and _named(f"heads {name}", progress)
        own = replace(settings, target=candidates, draft_layers=draft_layers)
        found = search(traces, place, own, searched, device, told)
        heads[name] = reached(Objective(traces, held_out, settings.sinks, settings.window, device), found)
    groups = {"1": heads["4 + 12"]}
    for count in [count for count in GROUPS if count <= depth_of(traces)]:
        parts = search_groups(traces, folder, settings, searched, count, device, progress)
        groups[str(count)] = reached_by_groups(traces, settings, held_out, parts, device)
    return {"heads": heads, "groups": groups}


def depth_of(traces: TraceSet) -> int:
    """Layers of the target."""
    return traces.sample(0).new_mass.shape[1]


def search_groups(
    traces: TraceSet,
    folder: str | Path,
    settings: SearchSettings,
    searched: Sequence[int],
    count: int,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> list[tuple[list[int], SearchResult]]:
    """Algorithm 1 for each of `count` equal parts of the target's depth: its layers, and what recovers them best."""
    depth = depth_of(traces)
    bounds = [round(i * depth / count) for i in range(count + 1)]
    found = []
    for first, end in zip(bounds, bounds[1:]):
        layers = list(range(first, end))
        name = f"layers {first} to {end - 1}"
        told = None if progress is None else _named(name, progress)
        place = Path(folder) / name.replace(" ", "")
        found.append((layers, search(traces, place, settings, searched, device, told, layers)))
    return found


def reached_by_groups(
    traces: TraceSet,
    settings: SearchSettings,
    held_out: Sequence[int],
    parts: Sequence[tuple[list[int], SearchResult]],
    device: torch.device | str = "cpu",
) -> dict[str, dict[str, float]]:
    """`reached` of every part, weighted by its share of the layers."""
    tables = [
        reached(Objective(traces, held_out, settings.sinks, settings.window, device, layers), found)
        for layers, found in parts
    ]
    depth = sum(len(layers) for layers, _ in parts)
    return {
        k: {
            name: sum(len(layers) / depth * table[k][name] for (layers, _), table in zip(parts, tables)) for name in row
        }
        for k, row in tables[0].items()
    }


def _named(name: str, progress: Progress) -> Progress:
    """Progress that says which of several searches it is of."""
    return lambda phase, done, total: progress(f"{name}: {phase}", done, total)


def reached(objective: Objective, found: SearchResult) -> dict[str, dict[str, float]]:
    """ARR of what a search has found, and of the oracle with one set: budget -> `hybrid`, `oracle`."""
    totals = {str(k): {"hybrid": 0.0, "oracle": 0.0} for k in found.splits}
    for number in objective.numbers:
        prepared = objective.prepared(number)
        history = prepared.sample.history(found.target)
        lookahead = prepared.sample.lookahead(found.draft)
        for k, m in found.splits.items():
            best = history_set(prepared.truth, prepared.sample.lengths, k, 0, 0)
            totals[str(k)]["hybrid"] += prepared.arr(history, lookahead, k, m) / len(objective.numbers)
            totals[str(k)]["oracle"] += prepared.arr_of(best) / len(objective.numbers)
    return totals
