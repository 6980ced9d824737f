"""Options that several commands share; it needs typer, so commands import it as they are built."""

from pathlib import Path
from typing import Annotated

import typer

METHODS = ("full", "streaming", "snapkv", "quest", "specattn", "target", "draft", "hybrid", "oracle")

# The pair, and where it runs.
Target = Annotated[str, typer.Option(help="Folder or Hub id.")]
Draft = Annotated[str, typer.Option(help="Folder or Hub id, of the same tokenizer; may be the target's.")]
Profile = Annotated[
    str | None, typer.Option(help="Folder, file or Hub id. Default: the one that comes with the pair, if any.")
]
Device = Annotated[str | None, typer.Option(help="torch device. Default: cuda where there is one, else cpu.")]

# How it decodes.
Gamma = Annotated[int, typer.Option(min=1, help="Drafted tokens per step.")]
Block = Annotated[int, typer.Option(min=1, help="Tokens that are verified at once.")]
Budget = Annotated[int, typer.Option(help="Cached tokens that verification attends to.")]
DraftCache = Annotated[str, typer.Option(help="auto, full, streaming or sparse.")]

# Runs over samples, method by method.
RunOut = Annotated[Path, typer.Option(help="Folder of the run; one that was interrupted goes on.")]
Methods = Annotated[
    list[str] | None, typer.Option(help=f"Of {', '.join(METHODS)}; repeatable. Default: full and hybrid.")
]
Budgets = Annotated[list[int] | None, typer.Option(help="Cached tokens that are read; repeatable. Default: 512.")]
BatchOfSamples = Annotated[int, typer.Option(min=1, help="Samples that are decoded together.")]

# Measurements, and where their results go.
Rows = Annotated[list[int] | None, typer.Option(min=1, help="Rows; repeatable. Default: 8, 16.")]
ResultOut = Annotated[Path | None, typer.Option(help="JSON file for the result.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite that file.")]
