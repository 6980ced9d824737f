"""LongBench samples, from a folder or from the Hub."""

import gzip
import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dustin_hf.eval.longbench.tasks import task_of

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"
SUFFIXES = (".jsonl", ".jsonl.gz")
_TYPES = {"input": str, "context": str, "answers": list, "length": int, "dataset": str, "language": str, "_id": str}


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample, in LongBench's own fields.

    Args:
        input: the question or command; the last example of few-shot tasks; empty in some tasks.
        context: the long text.
        answers: references; the best match counts.
        length: words (English, code) or characters (Chinese) of context, input and first answer.
        dataset: name of the task.
        language: "en", "zh", or the programming language.
        all_classes: labels of a classification task, None elsewhere.
        id: `_id` in the file.
    """

    input: str
    context: str
    answers: tuple[str, ...]
    length: int
    dataset: str
    language: str
    all_classes: tuple[str, ...] | None
    id: str


def load_samples(
    tasks: Sequence[str], folder: str | Path | None = None, limit: int | None = None
) -> dict[str, list[Sample]]:
    """Samples of tasks, by task, in the order of the files.

    The data set's script no longer runs in `datasets`, so the archive on the Hub is read as it is.

    Args:
        tasks: names.
        folder: with a `<task>.jsonl` or `<task>.jsonl.gz` for each. Default: `data.zip` of THUDM/LongBench on the Hub.
        limit: take so many of each task, from the first on. Default: all.

    Raises:
        ValueError: on an unknown task, or a file that is damaged or empty; the message names file and line.
        FileNotFoundError: if a task's file, or the Hub, is not there.
    """
    for task in tasks:
        task_of(task)
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` must be at least 1 sample of each task, got {limit}")
    if folder is not None:
        return {task: _from_folder(Path(folder), task, limit) for task in tasks}
    path = _download()
    try:
        with zipfile.ZipFile(path) as archive:
            return {task: _from_archive(archive, task, limit) for task in tasks}
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} cannot be read ({error}): remove it, and it is fetched again") from error


def _from_folder(folder: Path, task: str, limit: int | None) -> list[Sample]:
    found = [folder / (task + suffix) for suffix in SUFFIXES if (folder / (task + suffix)).is_file()]
    if not found:
        there = sorted(path.name for path in folder.glob("*") if path.name.endswith(SUFFIXES))
        raise _missing(task, f"`folder` {folder}", there)
    with gzip.open(found[0]) if found[0].suffix == ".gz" else found[0].open("rb") as lines:
        return _read(lines, str(found[0]), task, limit)


def _from_archive(archive: zipfile.ZipFile, task: str, limit: int | None) -> list[Sample]:
    name = f"data/{task}.jsonl"
    if name not in archive.namelist():
        raise _missing(task, f"{ARCHIVE} of {REPOSITORY}", sorted(archive.namelist()))
    with archive.open(name) as lines:
        return _read(lines, f"{ARCHIVE}, {name}", task, limit)


def _missing(task: str, place: str, there: list[str]) -> FileNotFoundError:
    return FileNotFoundError(f"{place} holds no file for {task}; it holds {', '.join(there) or 'no .jsonl file'}")


def _download() -> str:
    from huggingface_hub import hf_hub_download

    try:
        return hf_hub_download(REPOSITORY, ARCHIVE, repo_type="dataset")
    except OSError as error:  # also what the Hub's client raises: no connection, offline mode, a refusal
        raise FileNotFoundError(
            f"{ARCHIVE} of {REPOSITORY} cannot be fetched from the Hub ({type(error).__name__}: {error}): "
            "pass a `folder` (--data) with <task>.jsonl files"
        ) from error


def _read(lines: Iterable[bytes], name: str, task: str, limit: int | None) -> list[Sample]:
    """Samples on the lines of an open file; bytes, since only a newline ends a line of JSON."""
    samples: list[Sample] = []
    number, ids = 0, set[str]()
    try:
        for line in lines:
            number += 1
            if line.strip():
                samples.append(_sample(line, task))
                if samples[-1].id in ids:  # one answer would be scored for both
                    raise ValueError(f"'_id' {samples[-1].id!r} is that of a sample before")
                ids.add(samples[-1].id)
            if len(samples) == limit:
                break
    # ValueError: no UTF-8, no JSON or not these fields; the others: what holds the lines is damaged
    except (EOFError, OSError, zipfile.BadZipFile, zlib.error, ValueError) as error:
        at = number if isinstance(error, ValueError) else number + 1
        raise ValueError(f"{name}, line {at} cannot be read ({type(error).__name__}: {error})") from error
    if not samples:
        raise ValueError(f"{name} holds no sample")
    return samples


def _sample(line: bytes, task: str) -> Sample:
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
    for field, kind in _TYPES.items():
        if not isinstance(record.get(field), kind):
            raise ValueError(f"expected {field!r} to be a {kind.__name__}, got {record.get(field)!r:.80}")
    if record["dataset"] != task:
        raise ValueError(f"expected 'dataset' to be {task!r}, as the file's name, got {record['dataset']!r}")
    classes = record.get("all_classes")
    if not isinstance(classes, (list, type(None))):
        raise ValueError(f"expected 'all_classes' to be a list or null, got {classes!r:.80}")
    if not all(isinstance(text, str) for text in [*record["answers"], *(classes or [])]):
        raise ValueError("expected 'answers' and 'all_classes' to hold texts")
    return Sample(
        input=record["input"],
        context=record["context"],
        answers=tuple(record["answers"]),
        length=record["length"],
        dataset=record["dataset"],
        language=record["language"],
        all_classes=None if classes is None else tuple(classes),
        id=record["_id"],
    )
