"""The folder of a run: its configuration beside the answers, nothing overwritten, what a kill has torn mended."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dustin_hf.eval.efficiency.record import conditions
from dustin_hf.held import differing, write_file

CONFIG_NAME = "config.json"
# Of the conditions: what figures and answers may depend on.
SAME = ("gpu", "torch", "triton", "transformers", "dustin_hf", "commit")


class RunFolder:
    """Answers of one run: `config.json`, and `<task>.jsonl` with an answer on each line.

    Args:
        path: made by `begin` if absent.
        about: what a run that goes on must have in common with this one; ready for JSON.

    Attributes:
        lines: task -> id -> answer.

    Raises:
        ValueError: if the folder is of another run, or a line of it cannot be read.
    """

    def __init__(self, path: Path, about: dict[str, Any]):
        self.path, self.about = path, json.loads(json.dumps(about))
        held, tasks = self._held(), sorted(file.stem for file in path.glob("*.jsonl"))
        if not (self.about.keys() <= held.keys() if held else not tasks):
            raise ValueError(f"{path} holds files of something else: use another folder")
        self.lines = {task: self._read(task) for task in tasks}
        self.begun = any(self.lines.values())
        # a run that ended before its first answer, for a wrong option say, is none
        if self.begun and (different := differing(held, self.about)):
            raise ValueError(f"{path} holds a run with other {different}: use another folder, or remove it")
        recorded = (held.get("conditions"), *held.get("continued", [])) if self.begun else ()
        self.went_on: list[dict[str, Any]] = [each for each in recorded if each]
        self.now: dict[str, Any] = {}

    def _held(self) -> dict[str, Any]:
        config = self.path / CONFIG_NAME
        try:
            held = json.loads(config.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except ValueError as error:
            raise ValueError(f"{config} cannot be read ({error}): use another folder, or remove it") from error
        return held if isinstance(held, dict) else {"not": "ours"}

    def begin(self, command: str) -> None:
        """Write down what is run, and where, unless it has begun."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.now = self.now or conditions(command)
        if not self.went_on:
            self._note()

    def _note(self) -> None:
        self.went_on.append(self.now)
        first, *others = self.went_on
        content = {**self.about, "conditions": first} | ({"continued": others} if others else {})
        write_file(self.path / CONFIG_NAME, (json.dumps(content, indent=1) + "\n").encode())

    def _read(self, task: str) -> dict[str, dict[str, Any]]:
        """Answers by sample; a last line without its end, of a run that was killed, is cut off."""
        path = self.path / f"{task}.jsonl"
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        found = {}
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                found[record["id"]] = record
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} cannot be read ({type(error).__name__}: {error}): remove that line, it is "
                    "made again"
                ) from error
        if whole != content:
            write_file(path, whole)
        return found

    def has(self, task: str, ids: Sequence[str]) -> bool:
        """Whether all of these samples are answered."""
        return all(i in self.lines.get(task, {}) for i in ids)

    def add(self, task: str, lines: Sequence[dict[str, Any]]) -> None:
        """Append the answers that are not there yet; where they are of another machine or version, this is noted."""
        if any(self.went_on[-1].get(name) != self.now[name] for name in SAME):
            self._note()
        held = self.lines.setdefault(task, {})
        new = [line for line in lines if line["id"] not in held]
        with (self.path / f"{task}.jsonl").open("ab") as file:
            file.write(b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in new))
        held.update({line["id"]: line for line in new})
