"""The folder of a report: nothing in it is overwritten but what a report made, and it is there whole or as it was."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

FILES_NAME = "report_files.json"


def check_folder(out: str | Path, force: bool = False) -> set[str]:
    """Which files a report may overwrite in `out`; ask before anything is made.

    Args:
        out: the folder; it need not exist.
        force: whether an earlier report may go.

    Returns:
        The earlier report's files that are there, relative to `out`.

    Raises:
        ValueError: if `out` is a file, holds files that no report made, or a report and `force` is not given.
    """
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} must be a folder, got a file: choose another name")
    own = _own(out)
    held = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_symlink() or not path.is_dir()}
    if foreign := sorted(held - own):
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise ValueError(
            f"--out {out} holds files that are no report's: {', '.join(foreign[:3])}{more}. Choose another folder; "
            "--force does not overwrite these"
        )
    if held and not force:
        raise ValueError(f"--out {out} holds a report: choose another folder, or pass --force to overwrite it")
    return held


def publish(made: Path, out: Path, earlier: Iterable[str]) -> list[Path]:
    """Move a report into its folder, in place of an earlier one.

    The list of files goes first: whatever a kill leaves behind, it names all of it, and --force can go on.

    Args:
        made: folder with the files of the report; it is left empty of files.
        out: made if absent.
        earlier: files of the report that was there, relative to `out`.

    Returns:
        The new files in `out`.
    """
    names = sorted(path.relative_to(made).as_posix() for path in made.rglob("*") if path.is_file())
    out.mkdir(parents=True, exist_ok=True)
    for name in set(earlier) - {*names, FILES_NAME}:
        (out / name).unlink(missing_ok=True)
    text = json.dumps({"made_by": "dustin-hf report", "files": [*names, FILES_NAME]}, indent=1) + "\n"
    (made / FILES_NAME).write_text(text, encoding="utf-8")
    for name in [FILES_NAME, *names]:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(made / name, out / name)
    return [out / name for name in names]


def _own(out: Path) -> set[str]:
    """What an earlier report says that it made; nothing if there is none."""
    try:
        content = json.loads((out / FILES_NAME).read_text(encoding="utf-8"))
        return set(content["files"]) if content["made_by"] == "dustin-hf report" else set()
    except (OSError, ValueError, KeyError, TypeError):
        return set()
