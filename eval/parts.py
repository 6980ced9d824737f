"""What a long measurement has found so far, beside its result's file: the same command goes on where it was cut off."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dustin_hf.eval.efficiency.record import check_free, conditions, save
from dustin_hf.eval.run_folder import SAME, RunFolder

PARTS_SUFFIX = ".parts"


class Parts:
    """Parts of one result, made once each; `OUT.parts` holds them until the result is saved.

    Args:
        out: file of the result, which must be free; None keeps nothing.
        force: overwrite it, and forget parts of another run.
        command: as typed; only the same one goes on.

    Raises:
        ValueError: if nothing can be written at `out`.
    """

    def __init__(self, out: Path | None = None, force: bool = False, command: str = ""):
        self.out, self.force, self.command = out, force, command
        self._run: RunFolder | None = None
        if out is not None:
            check_free(out, force)

    def begin(self, *inputs: Any) -> None:
        """Look for parts of a run that was cut off.

        Args:
            inputs: what the run goes over, besides what the command says; ready for JSON.

        Raises:
            ValueError: if there are some of another run, and they are not to be forgotten.
        """
        if self.out is None:
            return
        folder = self.out.with_name(self.out.name + PARTS_SUFFIX)
        now = conditions(self.command.replace(" --force", ""))
        # figures of another machine or version are not of the same run
        about = {"command": now["command"], **{name: now[name] for name in SAME}}
        about["inputs"] = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
        try:
            self._run = RunFolder(folder, about)
        except ValueError:
            if not self.force:
                raise
            shutil.rmtree(folder)
            self._run = RunFolder(folder, about)

    def of(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make()` gives, ready for JSON, or gave to the run that was cut off."""
        run = self._run
        if run is None:
            return make()
        if not run.has("parts", [name]):
            found = make()
            run.begin(self.command)
            run.add("parts", [{"id": name, "found": found}])
        # as JSON has it, so that it matters not which of the runs has found it
        line = run.lines["parts"][name]
        if "found" not in line:
            raise ValueError(f"{run.path} holds nothing for {name!r}: remove it, or give --force")
        return json.loads(json.dumps(line["found"]))

    def save(self, result: dict[str, Any]) -> None:
        """Write the result, and let go of its parts."""
        if self.out is not None:
            save(self.out, result, self.force)
        if self._run is not None:
            shutil.rmtree(self._run.path, ignore_errors=True)
