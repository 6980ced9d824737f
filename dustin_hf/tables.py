"""Tables of results on the terminal: with rich where it is installed, else aligned text."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec


def aligned(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as text: first column to the left, the others, which are numbers, to the right."""
    widths = [max(len(line[i]) for line in (columns, *rows)) for i in range(len(columns))]
    lines = [title]
    for line in (columns, ["-" * width for width in widths], *rows):
        cells = [cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table."""
    if find_spec("rich") is None:
        print(aligned(title, columns, rows) + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.ROUNDED)
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row))  # as it is: no markup
    # a pipe or file has no width that columns should be cut to, and lines are as long as the table needs
    Console(width=None if sys.stdout.isatty() else 1000).print(table)
