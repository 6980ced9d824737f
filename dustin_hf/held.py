"""Files of runs that can be cut off: written whole or not at all, and which settings two runs do not share."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def differing(held: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Names whose values are not the same, whatever models are called: one is known by its shape and weights."""
    return [name for name in own if nameless(held.get(name)) != nameless(own[name])]


def nameless(value: Any) -> Any:
    """`value` without the names in its fingerprints."""
    if isinstance(value, Mapping):
        return {key: nameless(x) for key, x in value.items() if not (key == "id" and "weights" in value)}
    return [nameless(x) for x in value] if isinstance(value, list) else value


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever this is interrupted."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
