"""What a report is made of: tables with marks, drawings, sections; and how a table becomes Markdown and CSV."""

import csv
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MISSING = "-"
# `ins` rather than `u`, which sites that show Markdown tend to strip
WRAPPINGS = {"best": "**{}**", "second": "<ins>{}</ins>"}
Marks = Mapping[tuple[int, int], str]


@dataclass(frozen=True, slots=True)
class Table:
    """Cells as they are shown.

    Args:
        name: of its files, without suffix.
        title: what it shows, and which table of the paper it follows.
        columns: names; the first column holds names too, the others hold numbers.
        rows: text of each cell.
        caption: units, definitions, and what a reader could mistake.
        marks: (row, column) -> `"best"` or `"second"`; in Markdown only, a CSV file holds plain numbers.

    Raises:
        ValueError: if a row is longer or shorter than the columns.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str
    marks: Marks = field(default_factory=dict)

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            raise ValueError(f"`rows` of {self.name} must have {len(self.columns)} cells each: {self.rows}")

    def markdown(self) -> str:
        """The table alone, best cells bold and second best ones underlined."""

        def line(cells: Sequence[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        marked = [
            [WRAPPINGS.get(self.marks.get((i, j), ""), "{}").format(cell) for j, cell in enumerate(row)]
            for i, row in enumerate(self.rows)
        ]
        rule = "|---|" + "---:|" * (len(self.columns) - 1)
        return "\n".join([line(self.columns), rule, *map(line, marked)])

    def csv(self) -> str:
        """The cells, without marks."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.columns, *self.rows])
        return text.getvalue()


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure, or several of one kind.

    Args:
        name: of its files without suffix, or of their folder where they are several.
        caption: what is drawn, and which figure of the paper it follows.
        draw: writes the PNG and SVG files for a path without suffix, and returns them.
    """

    name: str
    caption: str
    draw: Callable[[Path], Sequence[Path]]


@dataclass(frozen=True, slots=True)
class Section:
    """Tables and figures that share their conditions.

    Args:
        title: heading.
        conditions: how all of it was measured.
        tables: in order.
        drawings: in order, behind the tables.
    """

    title: str
    conditions: str
    tables: tuple[Table, ...]
    drawings: tuple[Drawing, ...] = ()


def number(value: float | None, digits: int = 2, sign: bool = False) -> str:
    """A number with so many decimals, `-` where there is none."""
    if value is None or math.isnan(value):
        return MISSING
    rounded = round(value, digits) + 0.0  # no negative zero
    return f"{rounded:{'+' if sign else ''}.{digits}f}"


def tokens(count: int) -> str:
    """A context as the paper writes it: 8K are 8192 tokens."""
    return f"{count // 1024}K" if count % 1024 == 0 else str(count)


def slug(text: str) -> str:
    """A part of a file name out of any text."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.") or "unnamed"


def best_and_second(values: Sequence[Sequence[float | None]], groups: Sequence[object], first: int = 0) -> Marks:
    """Marks of the highest and second highest value of each column among the rows of a group.

    Values count as they are shown, in hundredths. Equal ones share a mark, and the next lower value is the second best.
    A column in which a group has a single value is left unmarked: there is nothing that it is better than.

    Args:
        values: of each row, None where one is missing.
        groups: what each row competes within; None for a row that does not compete.
        first: column of the table that the first value stands in.

    Returns:
        (row, column) -> `"best"` or `"second"`.
    """
    marks: dict[tuple[int, int], str] = {}
    for group in {each for each in groups if each is not None}:
        members = [i for i, each in enumerate(groups) if each == group]
        for column in range(len(values[members[0]])):
            shown = {i: round(x, 2) for i in members if (x := values[i][column]) is not None}
            ranks = dict(zip(sorted(set(shown.values()), reverse=True), ("best", "second")))
            if len(shown) > 1:
                marks |= {(i, column + first): ranks[x] for i, x in shown.items() if x in ranks}
    return marks
