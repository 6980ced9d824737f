"""How far a study is, as bars, and what each of its phases took."""

import json
import time
from pathlib import Path
from typing import Any

from transformers.utils.logging import tqdm

from dustin_hf.held import write_file
from dustin_hf.profiling.traces import Progress


class Timed:
    """Passes progress on, and keeps the seconds that each phase took in a file."""

    def __init__(self, progress: Progress, path: Path):
        self.progress, self.path, self.seconds = progress, path, dict[str, float]()
        self.phase, self.since = "start", time.perf_counter()

    def __call__(self, phase: str, done: int, total: int) -> None:
        self.enter(phase)
        self.progress(phase, done, total)

    def enter(self, phase: str) -> None:
        """From here on time goes to that phase."""
        if phase != self.phase:
            now = time.perf_counter()
            self.seconds[self.phase] = round(self.seconds.get(self.phase, 0.0) + now - self.since, 3)
            self.phase, self.since = phase, now
            write_file(self.path, json.dumps(self.seconds, indent=1).encode())


class ProgressBars:
    """A progress bar for each phase."""

    def __init__(self) -> None:
        self.phase = ""
        self.bar: Any = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        if phase != self.phase:
            if self.bar is not None:
                self.bar.close()
            self.phase, self.bar = phase, tqdm(total=total, desc=phase)
        self.bar.update(done - self.bar.n)
