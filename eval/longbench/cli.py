"""The command `dustin-hf longbench`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dustin_hf.tables import show

if TYPE_CHECKING:
    from typer import Typer


def add_commands(commands: "Typer") -> None:
    """Register the command."""
    import typer

    from dustin_hf import options

    @commands.command()
    def longbench(
        target: options.Target,
        draft: options.Draft,
        out: options.RunOut,
        data: Annotated[
            Path | None, typer.Option(help="Folder of TASK.jsonl or .jsonl.gz files. Default: LongBench on the Hub.")
        ] = None,
        task: Annotated[
            list[str] | None, typer.Option(help="Name, or en or zh for all of a language; repeatable. Default: en.")
        ] = None,
        method: options.Methods = None,
        budget: options.Budgets = None,
        limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task. Default: all.")] = None,
        batch: options.BatchOfSamples = 1,
        gamma: options.Gamma = 3,
        max_length: Annotated[
            int | None,
            typer.Option(min=2, help="Tokens that longer prompts are cut to. Default: what fits."),
        ] = None,
        draft_cache: options.DraftCache = "auto",
        profile: options.Profile = None,
        device: options.Device = None,
    ) -> None:
        """Answer LongBench under several methods, resumable, and score the answers as its authors do."""
        from dustin_hf.console import bars, command_line, one_line_errors, read_profile, the_device

        with one_line_errors():
            from dustin_hf.eval.answering import Settings, methods_of
            from dustin_hf.eval.efficiency.texts import load_pair
            from dustin_hf.eval.longbench import load_samples
            from dustin_hf.eval.longbench.metrics import check_libraries
            from dustin_hf.eval.longbench.run import run_longbench
            from dustin_hf.eval.longbench.tasks import task_of

            methods = methods_of(method or ["full", "hybrid"], budget or [512])
            # before models are loaded
            samples = load_samples(tasks_of(task or ["en"]), data, limit)
            check_libraries(samples)
            settings = Settings(gamma, batch, draft_cache)
            loaded = None if profile is None else read_profile(profile)
            answer = max(task_of(name).max_new_tokens for name in samples)
            longest = 0 if max_length is None else max_length + answer
            models = load_pair(target, draft, the_device(device), longest)
            with bars() as progress:
                found = run_longbench(
                    *models,
                    samples,
                    methods,
                    out,
                    settings,
                    max_length,
                    loaded,
                    command_line(),
                    progress,
                )
            report(found)


def tasks_of(names: Sequence[str]) -> list[str]:
    """Tasks by name, `en` and `zh` standing for all of a language."""
    from dustin_hf.eval.longbench import CHINESE, ENGLISH

    groups = {"en": ENGLISH, "zh": CHINESE}
    return list(dict.fromkeys(task for name in names for task in groups.get(name, (name,))))


def report(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print scores as a table: a row for each method, a column for each group of tasks."""
    groups = list(dict.fromkeys(group for row in found.values() for group in row["groups"]))
    rows = []
    for name, row in found.items():
        cells = [f"{row['groups'][group]:.2f}" if group in row["groups"] else "-" for group in groups]
        rows.append((name, *cells, f"{row['over_groups']:.2f}", f"{row['over_tasks']:.2f}"))
    show("LongBench scores, 0 to 100", ("method", *groups, "mean of groups", "mean of tasks"), rows)
