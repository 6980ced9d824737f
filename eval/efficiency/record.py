"""What makes a result worth keeping: its conditions, in a file that nothing overwrites by accident."""

import importlib
import json
import os
import platform
import shlex
import subprocess
import tempfile
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import dustin_hf


def conditions(command: str) -> dict[str, Any]:
    """When, on what, with which versions and by which command something is measured.

    Holds neither host names nor absolute paths: of such words in `command` the last part is kept.

    Args:
        command: as typed.

    Returns:
        Strings, numbers, booleans, and None where something does not apply or is unknown; ready for JSON.
    """
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = _git("rev-parse", "HEAD") if _in_checkout() else None
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(without_folders(word) for word in shlex.split(command)),
        "gpu": gpu,
        "gpu_count": torch.cuda.device_count() if gpu else 0,
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "transformers": _version("transformers"),
        "python": platform.python_version(),
        "dustin_hf": dustin_hf.__version__,
        "commit": commit or None,
        # changes to tracked files only: results lie untracked beside them until they are committed
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else None,
    }


def check_free(path: str | Path, force: bool = False) -> None:
    """Raise `ValueError` if no file can be written at `path`. Ask before measuring, not after."""
    if Path(path).is_dir():
        raise ValueError(f"--out {path} is a folder: name a file")
    for parent in Path(path).parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"--out {path} cannot be made: {parent} is a file")
    if Path(path).exists() and not force:
        raise ValueError(f"--out {path} exists: choose another name, or pass --force to overwrite it")


def save(path: str | Path, payload: dict[str, Any], force: bool = False) -> None:
    """Write `payload` as indented JSON; the file is there whole or not at all. Makes the folder.

    Args:
        path: where to.
        payload: what `json.dumps` takes; NaN and infinities are refused.
        force: overwrite what is there.

    Raises:
        ValueError: if the file exists and `force` is not given, or a number is not finite.
    """
    path = Path(path)
    check_free(path, force)
    text = json.dumps(payload, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes files that only their owner reads
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def without_folders(word: str) -> str:
    """`word` with an absolute path cut to its last part, also in `--option=/path`."""
    option, equals, value = word.rpartition("=")
    if not value.startswith(("/", "~", "\\")) and value[1:2] != ":":
        return word
    return option + equals + value.replace("\\", "/").rstrip("/").rpartition("/")[2]


def _run(*command: str) -> str | None:
    """Output of a command, None if it is absent, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _git(*arguments: str) -> str | None:
    return _run("git", "-C", str(Path(dustin_hf.__file__).resolve().parent), *arguments)


def _in_checkout() -> bool:
    """Whether git tracks this very package: an installed copy may lie inside somebody else's repository."""
    return _git("ls-files", "--error-unmatch", "__init__.py") is not None


def _driver() -> str | None:
    found = _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found.splitlines()[0].strip() if found else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # not there, or there under another distribution's name
        module = importlib.import_module(package) if find_spec(package) is not None else None
        return getattr(module, "__version__", None)
