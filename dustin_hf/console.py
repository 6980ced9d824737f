"""What all commands share besides options: errors as one line, progress bars, and what an option stands for."""

import errno
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Libraries that commands need, and the extra that brings each.
EXTRAS = {
    "matplotlib": "eval",
    "rapidfuzz": "eval",
    "rouge": "eval",
    "jieba": "eval",
    "optuna": "search",
    "datasets": "search",
    "rich": "bench",
}


def needs(library: str) -> None:
    """Raise `ModuleNotFoundError` unless an extra's library is there, before hours are spent."""
    from importlib.util import find_spec

    if find_spec(library) is None:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """What the user can mend is one line and exit status 1: values, files, extras, full disks, unsupported models."""
    import typer

    try:
        yield
    except Exception as error:
        import torch

        from dustin_hf.model_patches.families import UnsupportedModelError

        if isinstance(error, FileNotFoundError | ValueError | UnsupportedModelError):
            said = str(error)
        elif isinstance(error, torch.OutOfMemoryError):
            said = f"{str(error).splitlines()[0]} Lower --batch or --context"
        elif isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            said = f"this needs {error.name}: pip install 'dustin_hf[{EXTRAS[error.name]}]'"
        elif isinstance(error, OSError):
            said = (str(error) or type(error).__name__).splitlines()[0]
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                said += ": make room, and give the command again; what it has kept is not lost"
        elif isinstance(error, RuntimeError) and isinstance(error.__cause__, OSError):  # a full disk, in words
            said = str(error)
        else:
            raise
        typer.echo(f"error: {said}", err=True)
        raise typer.Exit(1) from error


@contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Progress bars on stderr, one for each phase, moved by `progress(phase, done, total)`."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as shown:
        tasks: dict[str, Any] = {}

        def progress(phase: str, done: int, total: int) -> None:
            for name, task in tasks.items():
                if name != phase:  # the phase before is over
                    shown.update(task, completed=shown.tasks[task].total)
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase)
            shown.update(tasks[phase], completed=done, total=total)

        yield progress
        for task in tasks.values():
            shown.update(task, completed=shown.tasks[task].total)


def read_profile(name: str) -> Any:
    """The profile of that name, with an error that names the option."""
    from dustin_hf.profile import DustinProfile

    try:
        return DustinProfile.from_pretrained(name)
    except OSError as error:
        raise FileNotFoundError(f"--profile {name}: {str(error).splitlines()[0]}") from error


def the_device(given: str | None) -> str:
    """The device that was asked for, else CUDA where there is one.

    Raises:
        ValueError: on one that torch does not know, or that is not there.
    """
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=given)
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        raise ValueError(f"--device {given}: {str(error).splitlines()[0]}") from error
    return given


def command_line() -> str:
    """The command as typed, without the place of the program."""
    return shlex.join(["dustin-hf", *sys.argv[1:]])
