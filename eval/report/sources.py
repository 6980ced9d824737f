"""Reads saved runs, and tells what each is: folder of a LongBench or RULER-style run, of a study, or a JSON file."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_hf.eval.longbench.run import SCORES_NAME
from dustin_hf.eval.longbench.tasks import TASKS
from dustin_hf.eval.parts import PARTS_SUFFIX
from dustin_hf.eval.run_folder import CONFIG_NAME
from dustin_hf.profiling.study import REPORT_NAME


@dataclass(frozen=True, slots=True)
class Source:
    """One saved run.

    Args:
        kind: of `KINDS`.
        path: its file, or the folder of a LongBench or RULER-style run.
        content: as saved; of such a run `config` and `scores`.
    """

    kind: str
    path: Path
    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For captions: file or folder with the folder that it lies in, no more of the path."""
        return "/".join(self.path.resolve().parts[-2:])


def _values(name: str) -> Callable[[Mapping[str, Any]], list[Any]]:
    return lambda content: list(content[name])


# What each kind holds: fields, the entries that tables are made of, and the fields of each entry.
KINDS: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[Any]], tuple[str, ...]]] = {
    "kernels": (
        ("conditions", "options", "notes", "steps"),
        _values("steps"),
        ("shape", "draft", "context", "batch", "sparse_us", "select_us", "step_us", "packed_ours_us", "packed_sdpa_us")
        + ("unpacked_flash_us", "times_packed_best", "times_unpacked_flash", "select_share"),
    ),
    "decode": (
        ("conditions", "target", "draft", "acceptance", "notes", "rows"),
        _values("rows"),
        ("arm", "context", "batch", "ragged", "gamma", "budget"),
    ),
    "prefill": (
        ("conditions", "target", "context", "notes", "rows"),
        _values("rows"),
        ("arm", "prompts", "seconds", "tokens_per_s", "peak_gb"),
    ),
    "overhead": (
        ("conditions", "target", "draft", "batch", "notes", "rows"),
        _values("rows"),
        ("estimator", "context", "us", "attention_us", "share"),
    ),
    "fidelity": (
        ("definition", "settings", "contexts", "results", "pearson"),
        _values("results"),
        ("mode", "budget", "agreement", "kl", "arr", "arr_committed", "contexts"),
    ),
    "pg19": (
        ("conditions", "settings", "passages", "perplexity"),
        _values("perplexity"),
        ("mode", "budget", "perplexity"),
    ),
    "study": (
        ("conditions", "definition", "settings", "held_out", "searched", "arr", "profile"),
        lambda content: [row for table in content["arr"].values() for row in table.values()],
        ("arr", "arr_committed", "arr_per_layer"),
    ),
    "longbench": (
        ("config", "scores"),
        lambda content: list(content["scores"]["tasks"].values()),
        ("score", "samples", "each"),
    ),
    "ruler": (("config", "scores"), _values("scores"), ()),
}
RUN_FIELDS = ("target", "draft", "dtype", "settings", "generation", "profile", "questions", "method")


def read_sources(paths: Iterable[str | Path]) -> list[Source]:
    """Every run of the paths, once, in their order.

    Args:
        paths: folders of LongBench or RULER-style runs or studies, folders of such folders, and JSON files: of `bench
            kernels`, `bench decode`, `bench prefill`, `bench overhead`, `fidelity` or `pg19`, and a study's report.

    Raises:
        FileNotFoundError: if a path does not exist.
        ValueError: if something is none of these, is not finished, or cannot be read.
    """
    found = {path.resolve(): path for given in paths for path in _places(Path(given))}
    if not found:
        raise ValueError("`paths` must hold at least one run, got none")
    return [_read_run(path) if path.is_dir() else _read_file(path) for path in found.values()]


def _places(path: Path) -> list[Path]:
    """The files and run folders that a path stands for."""
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give folders of runs, or JSON files")
    if not path.is_dir():
        return [path]
    if (path / CONFIG_NAME).is_file():
        return [path]
    if (path / REPORT_NAME).is_file():
        return [path / REPORT_NAME]
    inside = [each for each in sorted(path.iterdir()) if each.suffix == ".json" or _holds_runs(each)]
    if not inside:
        raise ValueError(
            f"{path} holds neither {CONFIG_NAME} (a LongBench or RULER-style run) nor {REPORT_NAME} (a study), nor "
            "folders that do, nor JSON files: give what does"
        )
    return [place for each in inside for place in _places(each)]


def _holds_runs(path: Path) -> bool:
    """Whether runs are in a folder, or in folders in it; a measurement that has not ended is none."""
    return path.is_dir() and not path.name.endswith(PARTS_SUFFIX) and any(path.rglob("*.json"))


def _read_file(path: Path) -> Source:
    content = _load(path)
    kind = content.get("bench")
    if kind is None:
        # these two kinds do not say what they are
        marks = {"fidelity": {"results", "pearson"}, "study": {"arr", "profile"}}
        kind = next((name for name, fields in marks.items() if fields <= content.keys()), None)
    if kind not in KINDS or kind in RUNS:
        given = f"`bench` {kind!r}" if kind else f"the fields {', '.join(sorted(content)[:8]) or 'none'}"
        raise ValueError(
            f"{path} is of no kind that a report knows: it has {given}. Give a result of `dustin-hf bench`, "
            "`fidelity`, `pg19` or `profile`, or the folder of a `dustin-hf longbench` or `ruler` run"
        )
    return _checked(Source(kind, path, content))


def _read_run(path: Path) -> Source:
    config = _load(path / CONFIG_NAME)
    _need(config, RUN_FIELDS, path / CONFIG_NAME, "a LongBench or RULER-style run")
    _need(config["method"], ("mode", "budget"), path / CONFIG_NAME, "a run of one method")
    kind = config.get("benchmark")
    if kind not in RUNS:
        raise ValueError(f"{path} is a run of {kind}: tables are made of runs of {' and '.join(RUNS)} alone")
    if not (path / SCORES_NAME).is_file():
        raise ValueError(f"{path} has no {SCORES_NAME}: the run has not ended. Give its command again, it goes on")
    scores = _load(path / SCORES_NAME)
    scored = RUNS[kind](scores, path / SCORES_NAME)
    if scored != set(config["questions"]):
        raise ValueError(
            f"{path / SCORES_NAME} must have the tasks of {CONFIG_NAME}, {', '.join(sorted(config['questions']))}, got "
            f"{', '.join(sorted(scored))}: give the command of the run again, which scores its answers"
        )
    return _checked(Source(kind, path, {"config": config, "scores": scores}))


def _longbench_tasks(scores: Mapping[str, Any], path: Path) -> set[str]:
    _need(scores, ("tasks", "over_groups", "over_tasks"), path, "the scores of a LongBench run")
    unknown = sorted(set(scores["tasks"]) - set(TASKS))
    if unknown:
        raise ValueError(f"{path} has tasks that LongBench has not: {', '.join(unknown)}")
    return set(scores["tasks"])


def _ruler_tasks(scores: Mapping[str, Any], path: Path) -> set[str]:
    numbers = [x for cells in scores.values() for x in (cells.values() if isinstance(cells, dict) else [None])]
    if not all(isinstance(x, int | float) for x in numbers):
        raise ValueError(f"{path} is torn: it must have scores by length for each task. Give the run's command again")
    return {f"{task}-{length}" for task, cells in scores.items() for length in cells}


# Kinds that are folders with a configuration; what their scores say that they answered.
RUNS: dict[str, Callable[[Mapping[str, Any], Path], set[str]]] = {"longbench": _longbench_tasks, "ruler": _ruler_tasks}


def _checked(source: Source) -> Source:
    """The source, if all that tables are made of is there."""
    fields, entries, of_each = KINDS[source.kind]
    _need(source.content, fields, source.path, f"a result of the kind {source.kind}")
    try:
        found = entries(source.content)
        for entry in found:
            _need(entry, of_each, source.path, f"an entry of the kind {source.kind}")
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{source.path} is torn: no entries of the kind {source.kind} ({error!r})") from error
    if not found:
        raise ValueError(f"{source.path} holds no entries of the kind {source.kind}: leave it out, or run it again")
    return source


def _need(content: Any, fields: Sequence[str], path: Path, what: str) -> None:
    missing = [name for name in fields if name not in content]
    if missing:
        raise ValueError(f"{path} is not {what}: it lacks {', '.join(missing)}. Make it again with this version")


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON file ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold one JSON object, got a {type(content).__name__}")
    return content
