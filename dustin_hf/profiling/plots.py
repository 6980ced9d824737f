"""Figures of a study's report and of a fidelity run, after those of the paper; each only where its data is there."""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that differ for every kind of colour vision (Okabe and Ito), and a marker each: one policy, one look.
STYLES: dict[str, tuple[str, str]] = {
    "hybrid": ("#D55E00", "o"),
    "history": ("#0072B2", "s"),
    "target": ("#0072B2", "s"),
    "lookahead": ("#009E73", "^"),
    "draft": ("#009E73", "^"),
    "streaming": ("#999999", "v"),
    "oracle": ("#000000", "D"),
    "oracle_per_layer": ("#CC79A7", "P"),
    "oracle-layers": ("#CC79A7", "P"),
    "default": ("#E69F00", "X"),
    "quest-16": ("#CC79A7", "P"),
    "naive": ("#000000", "X"),
}
OTHER = ("#56B4E9", ".")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
ARR, KL = "attention recovery rate", "KL(full || sparse), nats"
Results = Sequence[Mapping[str, Any]]
Splits = Mapping[int, Sequence[tuple[int, float]]]


def plot_study(folder: str | Path, out: str | Path) -> list[Path]:
    """Draw what a study's folder holds, each figure as PNG and SVG.

    - `history`: ARR by budget, oracle and history, of each recorded distance (paper figure 2).
    - `lookahead`: ARR by budget, oracle and lookahead, of this pair (paper figures 3 and 11, which set pairs side by
      side).
    - `layers`: ARR of each layer by history, lookahead and hybrid (paper figures 4 and 12).
    - `split`: ARR of every tried m (as paper figure 13, which has accuracy of tasks instead).
    - `one_set`: what one set for all layers costs each layer, against a set of its own (ours).
    - `rounds`: ARR by each candidate layer that the search could take (paper algorithm 1).

    Args:
        folder: as `profile_pair` leaves it, or the report in it; tried m's are read with Optuna where it is installed.
        out: folder of the figures, made if absent.

    Returns:
        The files.

    Raises:
        ValueError: if there is no report that can be read.
        ModuleNotFoundError: without matplotlib.
    """
    path = Path(folder) / "report.json" if Path(folder).is_dir() else Path(folder)
    report = _read(path, "arr")
    tables: Mapping[str, Any] = report["arr"]
    figures: dict[str, Callable[[], Any]] = {}
    distances = [name for name in next(iter(tables.values()), {}) if name.startswith("history")]
    if distances:
        figures["history"] = lambda: _by_budget(tables, ["oracle", *distances], "History (paper figure 2)")
    if _has(tables, "lookahead"):
        figures["lookahead"] = lambda: _by_budget(tables, ["oracle", "lookahead"], "Lookahead (paper figures 3, 11)")
    if tables:
        figures["layers"] = lambda: _by_layer(tables)
    if _has(tables, "oracle_per_layer"):
        figures["one_set"] = lambda: _one_set(tables)
    if report.get("rounds"):
        figures["rounds"] = lambda: _rounds(report["rounds"], report["candidates"])
    splits = tried_splits(path.parent, [int(k) for k in tables])
    if splits:
        figures["split"] = lambda: _split(splits)
    return [path for name, draw in figures.items() for path in save_figure(draw(), Path(out) / name)]


def plot_fidelity(path: str | Path, out: str | Path) -> list[Path]:
    """Draw a result of `fidelity`, each figure as PNG and SVG.

    - `arr_kl`: KL against ARR, a point for each context, mode and budget (as paper figure 9, whose points are sampled
      sets of one context).
    - `budgets`: KL and agreement by budget (ours).
    - `drift`: KL by window of the continuation: whether errors feed back (ours).

    Args:
        path: the JSON file.
        out: folder of the figures, made if absent.

    Returns:
        The files.

    Raises:
        ValueError: if the file is no such result.
        ModuleNotFoundError: without matplotlib.
    """
    result = _read(Path(path), "results")
    runs = [run for run in result["results"] if run["budget"] is not None and run["kl"] is not None]
    if not runs:
        return []
    figures = {
        "arr_kl": _arr_kl(runs, result["pearson"]["runs"]["arr"]),
        "budgets": _kl_by_budget(runs),
        "drift": _drift(runs, result["settings"]["gamma"]),
    }
    return [file for name, figure in figures.items() for file in save_figure(figure, Path(out) / name)]


def tried_splits(folder: Path, budgets: Sequence[int]) -> dict[int, list[tuple[int, float]]]:
    """Budget -> (m, ARR) of every m that the search has tried to the end; empty without its storage, or Optuna."""
    from dustin_hf.profiling.search import STORAGE_NAME

    path = folder / STORAGE_NAME
    if not path.is_file():
        return {}
    try:
        import optuna
    except ModuleNotFoundError:
        return {}
    storage = optuna.storages.RDBStorage(f"sqlite:///{path}")
    found = {}
    try:
        held = {study.study_name: study._study_id for study in storage.get_all_studies()}
        for budget in budgets:
            if f"budget {budget}" in held:
                trials = storage.get_all_trials(held[f"budget {budget}"], states=(optuna.trial.TrialState.COMPLETE,))
                tried = {trial.params["m"]: trial.value for trial in trials if trial.value is not None}
                found[budget] = sorted(tried.items())
    finally:
        storage.remove_session()
        storage.engine.dispose()
    return found


def _by_budget(tables: Mapping[str, Any], names: Sequence[str], title: str) -> "Figure":
    figure, (axes,) = new_figure(1)
    budgets = [int(k) for k in tables]
    for name in names:
        if _has(tables, name):
            _line(axes, budgets, [tables[str(k)][name]["arr"] for k in budgets], name)
    _budgets_axis(axes, budgets)
    axes.set(ylabel=ARR, title=title)
    axes.legend()
    return figure


def _by_layer(tables: Mapping[str, Any]) -> "Figure":
    figure, panels = new_figure(len(tables))
    for axes, (budget, table) in zip(panels, tables.items()):
        for name in ("oracle", "hybrid", "history", "lookahead"):
            if name in table:
                _line(axes, range(len(table[name]["arr_per_layer"])), table[name]["arr_per_layer"], name)
        _layers_axis(axes, "target layer")
        axes.set_title(f"Budget {budget} (paper figure 4)")
    panels[0].set_ylabel(ARR)
    panels[0].legend()
    return figure


def _one_set(tables: Mapping[str, Any]) -> "Figure":
    figure, panels = new_figure(len(tables))
    for axes, (budget, table) in zip(panels, tables.items()):
        best = table["oracle_per_layer"]["arr_per_layer"]
        for name in ("oracle", "hybrid"):
            if name in table:
                gap = [100 * (a - b) for a, b in zip(best, table[name]["arr_per_layer"])]
                _line(axes, range(len(gap)), gap, name)
        _layers_axis(axes, "target layer")
        axes.set_title(f"Budget {budget}: below a set of its own")
    panels[0].set_ylabel("points of " + ARR)
    panels[0].legend()
    return figure


def _rounds(rounds: Results, candidates: Mapping[str, Any]) -> "Figure":
    figure, panels = new_figure(len(rounds))
    for axes, found in zip(panels, rounds):
        places = candidates[found["model"]]
        tried = sorted((places[int(i)][0], arr, int(i) == found["taken"]) for i, arr in found["arr"].items())
        color = STYLES["target" if found["model"] == "target" else "draft"][0]
        axes.plot([layer for layer, _, _ in tried], [arr for _, arr, _ in tried], ".-", color=color)
        stars = [(layer, arr) for layer, arr, taken in tried if taken]
        axes.plot([layer for layer, _ in stars], [arr for _, arr in stars], "*", color="black", markersize=12)
        chosen = "" if found["taken"] is not None else ": none taken"
        _layers_axis(axes, f"{found['model']} layer added")
        axes.set_title(f"Search round{chosen}")
    panels[0].set_ylabel(ARR)
    return figure


def _split(splits: Splits) -> "Figure":
    figure, (axes,) = new_figure(1)
    for (budget, tried), color in zip(splits.items(), itertools.cycle(COLORS)):
        shares, rates = [m / budget for m, _ in tried], [arr for _, arr in tried]
        axes.plot(shares, rates, ".-", color=color, label=f"budget {budget}")
        best = max(range(len(rates)), key=rates.__getitem__)
        axes.plot(shares[best], rates[best], "*", color=color, markersize=12)
    axes.set(xlabel="share of the budget that follows the draft (m / k)", ylabel=ARR, title="Split of the budget")
    axes.legend()
    return figure


def _arr_kl(runs: Results, correlation: float | None) -> "Figure":
    figure, (axes,) = new_figure(1)
    for mode in dict.fromkeys(run["mode"] for run in runs):
        rows = [row for run in runs if run["mode"] == mode for row in run["contexts"] if row["kl"] is not None]
        color, marker = STYLES.get(mode, OTHER)
        axes.scatter(
            [row["arr"] for row in rows], [row["kl"] for row in rows], c=color, marker=marker, s=18, label=mode
        )
    known = "" if correlation is None else f", Pearson {correlation:.3f}"
    axes.set(xlabel=ARR, ylabel=KL, title=f"KL by ARR{known} (paper figure 9)")
    axes.legend()
    return figure


def _kl_by_budget(runs: Results) -> "Figure":
    figure, panels = new_figure(2)
    budgets = sorted({run["budget"] for run in runs})
    for axes, name, label in zip(panels, ("kl", "agreement"), (KL, "agreement")):
        for mode in dict.fromkeys(run["mode"] for run in runs):
            values = {run["budget"]: run[name] for run in runs if run["mode"] == mode}
            _line(axes, sorted(values), [values[k] for k in sorted(values)], mode)
        _budgets_axis(axes, budgets)
        axes.set(ylabel=label, title=f"Replay: {name.replace('kl', 'KL')} by budget")
    panels[0].legend()
    return figure


def _drift(runs: Results, gamma: int) -> "Figure":
    budgets = sorted({run["budget"] for run in runs})
    figure, panels = new_figure(len(budgets))
    for axes, budget in zip(panels, budgets):
        for run in runs:
            if run["budget"] == budget:
                rows = [one["windows"]["kl"] for one in run["contexts"]]
                # of each window, the contexts that have it
                columns = [[row[i] for row in rows if i < len(row)] for i in range(max(map(len, rows)))]
                means = [sum(column) / len(column) for column in columns]
                _line(axes, [i * gamma for i in range(len(means))], means, run["mode"])
        axes.set(xlabel="new token", title=f"Replay: KL along the text, budget {budget}")
    panels[0].set_ylabel(KL)
    panels[0].legend()
    return figure


def new_figure(panels: int, width: float = 4.4) -> "tuple[Figure, list[Axes]]":
    """A figure with panels side by side, each so many inches wide."""
    from matplotlib.figure import Figure  # an extra; this class alone needs neither pyplot nor a display

    figure = Figure(figsize=(width * panels + 0.6, 3.8), layout="constrained")
    found = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in found:
        axes.grid(alpha=0.3)
    return figure, found


def _line(axes: "Axes", x: Sequence[float], y: Sequence[float], name: str) -> None:
    base, _, distance = name.partition("_") if name.startswith("history_") else (name, "", "")
    color, marker = STYLES.get(base, OTHER)
    style = "--" if distance else "-"
    label = f"history, {distance} tokens before" if distance else name.replace("_", " ")
    # later distances fade
    axes.plot(x, y, style, color=color, marker=marker, ms=4, alpha=0.6 if distance else 1.0, label=label)


def _layers_axis(axes: "Axes", label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(label)


def _budgets_axis(axes: "Axes", budgets: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(k) for k in budgets])
    axes.minorticks_off()
    axes.set_xlabel("budget k")


def _has(tables: Mapping[str, Any], name: str) -> bool:
    return bool(tables) and all(name in table for table in tables.values())


def _read(path: Path, needed: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content[needed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a result that can be drawn ({type(error).__name__}: {error})") from error
    return content


def save_figure(figure: "Figure", stem: Path) -> list[Path]:
    """`stem.png` and `stem.svg`; matplotlib takes the Agg and SVG canvases by the names."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    return paths
