"""LongBench runs as the paper's tables 1, 6 and 7 (scores), 8 (drops), 3 and 14 (variants of Dustin by task).

Scores of groups and their average are means over samples, as the paper's are: all 58 rows of its tables 1, 6 and 7
average their groups by 550, 600, 600, 600, 400 and 1000 of 3750 samples, to 0.006; and the differences of its table 14,
weighted by samples within a group, are those of Qwen2.5-32B in its table 7. LongBench's own averages, over tasks and
over groups, stand in the table by task.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dustin_hf.eval.longbench.tasks import GROUPS, TASKS
from dustin_hf.eval.report.captions import measured
from dustin_hf.eval.report.layout import MISSING, Marks, Section, Table, number, slug
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

VARIANTS = ("target", "draft", "hybrid")
TABLE_3 = ("triviaqa", "multi_news")
# Whether the tokenizer had a template; earlier runs did not note it.
CHAT = {True: " in the chat template (few-shot and code: bare)", False: " without a chat template", None: ""}
GROUPED = "Groups and Avg. are means over samples, as in the paper."
# Rows that the paper's table 8 quotes from SmallKV's (arXiv:2508.02751), of another model. SmallKV
# itself does not run here: it evicts for good, and for tokens of middle weight it keeps values without keys, with the
# small model's attention in place of the target's, which is no choice of slots.
PUBLISHED = (
    ("Qwen2-7B, full cache +", "-", "39.04", "40.78", "22.31", "70.07", "-", "56.95"),
    (
        "SmallKV with Qwen2-7B +",
        "512",
        "33.14 (-5.90)",
        "37.54 (-3.24)",
        "21.55 (-0.76)",
        "68.39 (-1.68)",
        "-",
        "56.83 (-0.12)",
    ),
)
MEMBERS = [[task for task in TASKS if TASKS[task].group == group] for group in GROUPS]
# All but the synthetic ones, whose scores say little where a model finds hardly any passage: what it writes after its
# guess decides.
NATURAL = tuple(task for task in TASKS if TASKS[task].group != "synthetic")


@dataclass(frozen=True, slots=True)
class Run:
    """One method on one set of samples.

    Args:
        mode: of `cache_config`.
        budget: slots that verification reads; None where it reads all.
        scores: task -> 0 to 100.
        samples: task -> how many.
        each: task -> the scores of its samples, in the order of all runs on them.
        means: LongBench's own averages, over tasks and over groups.
    """

    mode: str
    budget: int | None
    scores: dict[str, float]
    samples: dict[str, int]
    each: dict[str, list[float]]
    means: tuple[float, float]

    @property
    def name(self) -> str:
        """As the paper writes it."""
        return method_name(self.mode)

    def mean(self, tasks: Sequence[str]) -> float | None:
        """Mean over the samples of those tasks that were run, None if none was."""
        held = [task for task in tasks if task in self.scores]
        count = sum(self.samples[task] for task in held)
        return sum(self.scores[task] * self.samples[task] for task in held) / count if count else None

    def in_groups(self) -> list[float | None]:
        """Means of the six groups, then of all."""
        return [*(self.mean(tasks) for tasks in MEMBERS), self.mean(list(TASKS))]

    def difference(self, other: "Run", tasks: Sequence[str]) -> tuple[float | None, float | None]:
        """Mean of this run less another's over the samples of some tasks, and its standard error over samples in pairs.

        None where there is no sample, or for the error a single one.
        """
        held = [task for task in tasks if task in self.each]
        gaps = [a - b for task in held for a, b in zip(self.each[task], other.each[task], strict=True)]
        mean, lossless = self.mean(tasks), other.mean(tasks)
        error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else None
        return None if mean is None or lossless is None else mean - lossless, error


def accuracy_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each set of runs that only their methods tell apart: the same models, settings and samples.

    Args:
        sources: LongBench runs.

    Raises:
        ValueError: if two of them are of one method on the same set.
    """
    return [_section(members) for members in comparable(sources, also=("max_length",))]


def _section(sources: Sequence[Source]) -> Section:
    runs = [_run(source) for source in sources]
    config = sources[0].content["config"]
    target, draft = pair_of(config)
    tables = [_scores(runs, target), *_leads(runs, target), _by_task(runs, target)]
    full = next((run for run in runs if run.mode == "full"), None)
    if full is not None and len(runs) > 1:
        tables.insert(1, _drops(runs, full, target))
        for budget in dict.fromkeys(run.budget for run in runs if run.mode in VARIANTS):
            variants = {run.mode: run for run in runs if run.mode in VARIANTS and run.budget == budget}
            if len(variants) > 1:
                tables += _variants(variants, full, target)
    conditions = (
        set_up(config, f"prompts of at most {config['max_length']} tokens{CHAT[config.get('chat_template')]}, ")
        + f" {_samples(runs[0])} "
        + measured(sources, conditions_of(sources))
    )
    return Section(f"LongBench: {target} with {draft}", conditions, tuple(tables))


def _run(source: Source) -> Run:
    config, scores = source.content["config"], source.content["scores"]
    tasks = {name: scores["tasks"][name] for name in TASKS if name in scores["tasks"]}
    return Run(
        config["method"]["mode"],
        config["method"]["budget"],
        {name: task["score"] for name, task in tasks.items()},
        {name: task["samples"] for name, task in tasks.items()},
        {name: task["each"] for name, task in tasks.items()},
        (scores["over_tasks"], scores["over_groups"]),
    )


def _samples(run: Run) -> str:
    """Samples of each task, tasks of one size together."""
    sizes: dict[int, list[str]] = {}
    for task, count in run.samples.items():
        sizes.setdefault(count, []).append(task)
    return "Samples per task: " + "; ".join(f"{count} of {', '.join(tasks)}" for count, tasks in sizes.items()) + "."


def _budget(run: Run) -> str:
    return number(run.budget, 0)


def _marks(runs: Sequence[Run], values: Sequence[Sequence[float | None]]) -> Marks:
    return marks([(run.mode, run.budget) for run in runs], values)


def _footnote(runs: Sequence[Run]) -> str:
    return footnote([run.mode for run in runs])


def _scores(runs: Sequence[Run], target: str) -> Table:
    values = [run.in_groups() for run in runs]
    return Table(
        f"accuracy-{slug(target)}",
        f"Accuracy of {target} on LongBench (layout of the paper's tables 1, 6 and 7)",
        ("Method", "Budget", *GROUPS, "Avg."),
        tuple((run.name, _budget(run), *map(number, row)) for run, row in zip(runs, values)),
        f"Scores, 0 to 100. {GROUPED} Acceptance is real. {MARKED}{_footnote(runs)}",
        _marks(runs, values),
    )


def _drops(runs: Sequence[Run], full: Run, target: str) -> Table:
    def cell(run: Run, tasks: Sequence[str], with_error: bool = True) -> str:
        mean, (gap, error) = run.mean(tasks), run.difference(full, tasks)
        lost = "" if mean is None or run is full else f" ({_gap(gap, error if with_error else None)})"
        return number(mean) + lost

    return Table(
        f"accuracy-drop-{slug(target)}",
        f"Accuracy of {target} beside the lossless run (layout of the paper's table 8)",
        ("Method", "Budget", *GROUPS, "Avg.", "Avg. but synthetic"),
        (
            *(
                (
                    run.name,
                    _budget(run),
                    *(cell(run, tasks, with_error=False) for tasks in MEMBERS),
                    cell(run, list(TASKS)),
                    cell(run, NATURAL),
                )
                for run in runs
            ),
            *((*row, MISSING, MISSING) for row in PUBLISHED),
        ),
        "Scores, 0 to 100, and in brackets their differences from the lossless run, in points; those of the averages "
        f"with their standard errors, over samples in pairs. {GROUPED} Acceptance is real. The paper has no column for "
        f"the synthetic tasks here.{_footnote(runs)} + Not measured here: quoted as in the paper, of about 512 tokens.",
    )


def _leads(runs: Sequence[Run], target: str) -> list[Table]:
    """What Dustin scores above the other methods of its budget."""
    ours = {run.budget: run for run in runs if run.mode == "hybrid"}
    others = [run for run in runs if run.budget in ours and run.mode != "hybrid"]
    if not others:
        return []
    return [
        Table(
            f"accuracy-lead-{slug(target)}",
            f"Dustin's score less that of other methods, {target} (ours)",
            ("Method", "Budget", "Avg.", "Avg. but synthetic"),
            tuple(
                (
                    run.name,
                    _budget(run),
                    *(_gap(*ours[run.budget].difference(run, tasks)) for tasks in (list(TASKS), NATURAL)),
                )
                for run in others
            ),
            "Points, with standard errors over samples in pairs; positive: Dustin scores higher. Means over samples. "
            f"Acceptance is real.{_footnote(others)}",
        )
    ]


def _gap(difference: float | None, error: float | None) -> str:
    return number(difference, sign=True) + ("" if error is None else f" ± {number(error)}")


def _by_task(runs: Sequence[Run], target: str) -> Table:
    tasks = list(runs[0].scores)
    values = [[*(run.scores[task] for task in tasks), *run.means] for run in runs]
    return Table(
        f"accuracy-tasks-{slug(target)}",
        f"Accuracy of {target} by task (ours)",
        ("Method", "Budget", *tasks, "mean of tasks", "mean of groups"),
        tuple((run.name, _budget(run), *map(number, row)) for run, row in zip(runs, values)),
        "Scores, 0 to 100; the means are LongBench's own, over tasks, and over groups whose score is the mean of their "
        f"tasks. Acceptance is real. {MARKED}{_footnote(runs)}",
        _marks(runs, values),
    )


def _variants(variants: dict[str, Run], full: Run, target: str) -> list[Table]:
    """Tables 3 and 14 of one budget."""
    budget = next(iter(variants.values())).budget
    names = {"target": "Dustin-T", "draft": "Dustin-D", "hybrid": "Dustin-H"}
    gap = {mode: {task: run.scores[task] - full.scores[task] for task in full.scores} for mode, run in variants.items()}
    rows = []
    for task in full.scores:
        given = [gap[mode][task] if mode in gap else None for mode in VARIANTS]
        rows.append((task, given, max(x for x in given if x is not None)))
    means = [sum(gap[mode].values()) / len(rows) if mode in gap else None for mode in VARIANTS]
    rows.append(("Average", means, sum(best for _, _, best in rows) / len(rows)))
    about = f"Budget {budget}. Differences from the lossless run, in points; losses are negative. Acceptance is real."
    tables = [
        Table(
            f"variants-tasks-{slug(target)}-k{budget}",
            f"Variants of Dustin by task, {target} (layout of the paper's table 14)",
            ("Benchmark", *names.values(), "Best of them"),
            tuple(
                (task, *(number(x, sign=True) for x in given), number(best, sign=True)) for task, given, best in rows
            ),
            f"{about} Best of them, which the paper calls Oracle: the best variant of each task. Average: over tasks.",
        )
    ]
    shown = [task for task in TABLE_3 if task in full.scores]
    if shown:
        cells = {
            mode: [text for task in shown for text in (number(run.scores[task]), number(gap[mode][task], sign=True))]
            for mode, run in variants.items()
        }
        tables.append(
            Table(
                f"variants-{slug(target)}-k{budget}",
                f"Variants of Dustin, {target} (layout of the paper's table 3)",
                ("Method", *(column for task in shown for column in (f"{task} score", f"{task} difference"))),
                tuple((names[mode], *cells[mode]) for mode in VARIANTS if mode in cells),
                f"{about} Scores, 0 to 100.",
            )
        )
    return tables
