"""Results of `bench decode` as the paper's tables 2 and 9 to 11, and as its figure 1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dustin_hf.eval.efficiency.arms import ARMS
from dustin_hf.eval.efficiency.stock import STOCK_ARMS
from dustin_hf.eval.report.captions import machine, measured, model_name, notes
from dustin_hf.eval.report.figures import Step, draw_steps
from dustin_hf.eval.report.layout import Drawing, Section, Table, number, slug, tokens
from dustin_hf.eval.report.sources import Source

Row = Mapping[str, Any]
NAMES = {
    "hf": "stock generate",
    "hf-static": "stock generate, static cache",
    "vanilla": "Vanilla",
    "classic": "ClassicSD",
    "magicdec": "MagicDec",
    "specattn": "SpecAttn-style",
    "dustin": "Dustin",
    "dustin-streaming": "Dustin, streaming drafts",
    "dustin-sparse": "Dustin, sparse drafts",
}
ORDER = (*STOCK_ARMS, *ARMS)
PHASES = ("draft", "select", "verify", "accept")
SPEED = (
    "tok/s: committed tokens of all rows together, prefill left out. tau: tokens committed per step and row, the "
    "target's own included. alpha: tok/s over those of Vanilla, this engine without a draft, in the same run."
)


@dataclass
class Group:
    """Results that can stand in one table: of one pair, acceptance and machine, and no point twice.

    Args:
        sources: their files.
        rows: of all of them, each an arm at a point.
    """

    sources: list[Source]
    rows: list[Row]

    def __post_init__(self) -> None:
        content = self.sources[0].content
        self.target, self.draft = model_name(content["target"]), model_name(content["draft"])
        self.pair = f"{self.target} with {self.draft}"
        self.acceptance = f"Acceptance is {content['acceptance']}."
        self.ragged = self.rows[0]["ragged"]
        kind = "simulated" if content["acceptance"].startswith("simulated") else "real"
        self.kind = f"{kind}, ragged rows" if self.ragged else kind
        self.stem = slug(f"{self.target} {self.kind}")

    @property
    def points(self) -> set[tuple[int, int]]:
        """Batch and context of every row."""
        return {(row["batch"], row["context"]) for row in self.rows}

    def context(self, count: int) -> str:
        """How long the rows are."""
        return f"{'up to ' if self.ragged else ''}{tokens(count)}"

    def size(self, batch: int, context: int) -> str:
        """A point in words."""
        return f"{batch} x {self.context(context)}"

    def has(self, name: str) -> bool:
        """Whether any row has a value of that name."""
        return any(row.get(name) is not None for row in self.rows)


def decode_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each group of results of `bench decode`, of simulated or real acceptance."""
    together: dict[tuple[Any, ...], list[Group]] = {}
    for source in sources:
        content = source.content
        about = [content.get(name) for name in ("target", "draft", "acceptance", "profile", "weights")]
        # stock arms run equal rows also where the others' are ragged, and cannot stand beside those
        for ragged in dict.fromkeys(row["ragged"] for row in content["rows"]):
            rows = [row for row in content["rows"] if row["ragged"] == ragged]
            drafting = frozenset((row["gamma"], row["budget"]) for row in rows if row["gamma"] and row["budget"])
            new = Group([source], rows)
            groups = together.setdefault((*about, ragged, drafting, machine(content["conditions"])), [])
            home = next((group for group in groups if not group.points & new.points), None)
            if home is None:
                groups.append(new)
            else:
                home.sources.append(source)
                home.rows += rows
    return [_section(group) for groups in together.values() for group in groups]


def _section(group: Group) -> Section:
    title = f"Decoding of {group.pair} (layout of the paper's tables 2 and 9 to 11)"
    failed = [row for row in group.rows if "error" in row]
    told = (f"{_name(row['arm'])}, {group.size(row['batch'], row['context'])}: {row['error']}" for row in failed)
    caption = f"{SPEED} Failed: {'; '.join(told)}." if failed else SPEED
    tables = [_speeds(group, "tokens_per_s", f"decode-{group.stem}", title, caption)]
    if group.has("steady_tokens_per_s"):
        caption = f"{SPEED} Only the steps in which all rows were active count, but tau is that of the whole decode."
        title = f"Decoding of {group.pair} while all rows are active (ours)"
        tables.append(_speeds(group, "steady_tokens_per_s", f"decode-steady-{group.stem}", title, caption))
    if group.has("copied"):
        tables.append(_old_text(group))
    conditions = f"{_settings(group)} {measured(group.sources, [s.content['conditions'] for s in group.sources])}"
    said = f"{conditions} Notes of the run: {notes(group.sources)}"
    return Section(f"Decoding: {group.pair}, acceptance {group.kind}", said, tuple(tables), _drawings(group))


def _settings(group: Group) -> str:
    content, drafting = group.sources[0].content, [row for row in group.rows if row["gamma"]]
    said = [f"Target {group.target}, draft {group.draft}; acceptance {content['acceptance']}"]
    for name in ("gamma", "budget"):
        values = sorted({row[name] for row in drafting if row[name] is not None})
        said += [f"{name} {', '.join(map(str, values))}"] if values else []
    said += [f"profile: {content['profile']}"] if content.get("profile") else []
    return "; ".join(said) + "."


def _name(arm: str) -> str:
    return NAMES.get(arm, arm)


def _lines(group: Group) -> list[tuple[str, int, dict[int, Row]]]:
    """Method, batch, and the row of each context; a method that was run with several taus has a line for each."""
    lines: dict[tuple[int, str], list[dict[int, Row]]] = {}
    for row in group.rows:
        held = lines.setdefault((row["batch"], row["arm"]), [])
        line = next((line for line in held if row["context"] not in line), None)
        if line is None:
            held.append(line := {})
        line[row["context"]] = row
    ranked = sorted(lines, key=lambda key: (key[0], ORDER.index(key[1]) if key[1] in ORDER else len(ORDER)))
    return [(arm, batch, line) for batch, arm in ranked for line in lines[batch, arm]]


def _speeds(group: Group, speed: str, name: str, title: str, caption: str) -> Table:
    base = {
        (batch, context): row for arm, batch, line in _lines(group) if arm == "vanilla" for context, row in line.items()
    }

    def cells(row: Row) -> tuple[str, ...]:
        own, other = row.get(speed), base.get((row["batch"], row["context"]), {}).get(speed)
        # the paper has no tau where nothing is drafted
        tau = row.get("tau") if row["gamma"] else None
        return number(own, 1), number(tau), number(own / other if own and other else None)

    return _by_context(group, ("tok/s", "tau", "alpha"), cells, name, title, f"{group.acceptance} {caption}")


def _old_text(group: Group) -> Table:
    def cells(row: Row) -> tuple[str, ...]:
        shares = (row.get(name) for name in ("copied", "repeated"))
        tau = row.get("tau_fresh") if row["gamma"] else None
        return (*(number(None if share is None else 100 * share, 0) for share in shares), number(tau))

    return _by_context(
        group,
        ("copied %", "repeated %", "fresh tau"),
        cells,
        f"decode-old-{group.stem}",
        f"Decoding of {group.pair}: how much of its text was there before (ours)",
        f"{group.acceptance} Shares of the new 8-grams that the row's prompt holds (copied), or its own output before "
        "them (repeated). fresh tau: of the rows with little of either; - where no row is fresh.",
    )


def _by_context(group: Group, titles: Sequence[str], cells: Any, name: str, title: str, caption: str) -> Table:
    """A line for each method and batch, and `titles` for each context, filled by `cells(row)`."""
    contexts = sorted({row["context"] for row in group.rows})
    nothing = (number(None),) * len(titles)
    rows = []
    for arm, batch, line in _lines(group):
        filled = (cells(line[context]) if context in line else nothing for context in contexts)
        rows.append((_name(arm), str(batch), *(cell for part in filled for cell in part)))
    columns = (f"{group.context(context)} {each}" for context in contexts for each in titles)
    return Table(name, title, ("Method", "Batch", *columns), tuple(rows), caption)


def _drawings(group: Group) -> tuple[Drawing, ...]:
    """Figure 1 at the longest context of the largest batch whose phases are known."""
    timed = [(row["batch"], row["context"]) for row in group.rows if _phases(row)]
    if not timed:
        return ()
    batch, context = max(timed)
    shown = [line[context] for _, here, line in _lines(group) if here == batch and context in line]
    shown = [row for row in shown if _phases(row)]
    steps = []
    for row in shown:
        alike = [other for other in shown if other["arm"] == row["arm"]]
        label = _name(row["arm"]) + (f", tau {row['tau']:.1f}" if len(alike) > 1 else "")
        steps.append(Step(label, _phases(row), row["step_ms"]))
    title = f"{group.target}({group.draft}), {group.size(batch, context)}"
    caption = (
        f"Milliseconds of a step of {title} tokens, by phase (as the paper's figure 1). rest: what of a step lies "
        f"outside its phases. {group.acceptance}"
    )
    return (Drawing(f"fig1-step-{group.stem}", caption, partial(draw_steps, steps, title)),)


def _phases(row: Row) -> dict[str, float]:
    """Milliseconds of each phase of a step; none where they were not measured."""
    if row.get("phases_s"):
        return {name: row["phases_s"].get(name, 0.0) / row["steps"] * 1e3 for name in PHASES}
    return {name: row["phases_ms"].get(name, 0.0) for name in PHASES} if row.get("phases_ms") else {}
