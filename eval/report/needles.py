"""RULER-style runs: scores of every method by length of the prompt, and by task."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from dustin_hf.eval.report.captions import measured
from dustin_hf.eval.report.layout import Section, Table, number, slug, tokens
from dustin_hf.eval.report.methods import (
    MARKED,
    comparable,
    conditions_of,
    footnote,
    marks,
    method_name,
    pair_of,
    set_up,
)
from dustin_hf.eval.report.sources import Source


def needle_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each set of `ruler` runs that only their methods tell apart.

    Raises:
        ValueError: if two of them are of one method on the same set.
    """
    return [_section(members) for members in comparable(sources)]


def _section(sources: Sequence[Source]) -> Section:
    config = sources[0].content["config"]
    target, draft = pair_of(config)
    scores: list[Mapping[str, Mapping[str, float]]] = [source.content["scores"] for source in sources]
    methods = [(m["mode"], m["budget"]) for m in (source.content["config"]["method"] for source in sources)]
    tasks = list(scores[0])
    lengths = sorted({int(length) for cells in scores[0].values() for length in cells})

    def table(name: str, title: str, columns: Sequence[str], values: list[list[float]], about: str) -> Table:
        rows = [
            (method_name(mode), number(budget, 0), *map(number, row)) for (mode, budget), row in zip(methods, values)
        ]
        caption = f"Scores, 0 to 100: shares of the answers found. {about}Acceptance is real. {MARKED}"
        return Table(
            f"{name}-{slug(target)}",
            f"{title}, {target} (ours)",
            ("Method", "Budget", *columns),
            tuple(rows),
            caption + footnote([mode for mode, _ in methods]),
            marks(methods, values),
        )

    columns = [(task, str(n)) for task in tasks for n in lengths if str(n) in scores[0][task]]
    whole = [n for n in lengths if all((task, str(n)) in columns for task in tasks)]
    by_length = [[fmean(found[task][str(n)] for task in tasks) for n in whole] for found in scores]
    by_task = [[found[task][n] for task, n in columns] for found in scores]
    tables = (
        table("ruler", "RULER-style tasks by length", [*map(tokens, whole)], by_length, "Means over tasks. "),
        table(
            "ruler-tasks",
            "RULER-style tasks by task and length",
            [f"{task} {tokens(int(n))}" for task, n in columns],
            by_task,
            "",
        ),
    )
    conditions = measured(sources, conditions_of(sources))
    return Section(f"RULER-style tasks: {target} with {draft}", f"{set_up(config)} {conditions}", tables)
