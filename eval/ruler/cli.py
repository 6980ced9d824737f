"""The command `dustin-hf ruler`."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dustin_hf.tables import show

if TYPE_CHECKING:
    from typer import Typer


def add_commands(commands: "Typer") -> None:
    """Register the command."""
    import typer

    from dustin_hf import options

    @commands.command()
    def ruler(
        target: options.Target,
        draft: options.Draft,
        out: options.RunOut,
        texts: Annotated[
            Path | None, typer.Option(help="Haystack: folder or file of .txt, .txt.gz, .jsonl. Default: book excerpts.")
        ] = None,
        task: Annotated[list[str] | None, typer.Option(help="Name; repeatable. Default: all four.")] = None,
        length: Annotated[
            list[int] | None, typer.Option(min=1, help="Tokens of prompt and answer; repeatable. Default: 4096, 8192.")
        ] = None,
        samples: Annotated[int, typer.Option(min=1, help="Samples of each task and length.")] = 10,
        method: options.Methods = None,
        budget: options.Budgets = None,
        batch: options.BatchOfSamples = 1,
        gamma: options.Gamma = 3,
        draft_cache: options.DraftCache = "auto",
        chat: Annotated[bool, typer.Option("--chat", help="Wrap prompts in the tokenizer's chat template.")] = False,
        profile: options.Profile = None,
        device: options.Device = None,
    ) -> None:
        """Find facts in long texts under several methods, resumable, and score the answers (RULER-style)."""
        from dustin_hf.console import bars, command_line, one_line_errors, read_profile, the_device

        with one_line_errors():
            from dustin_hf.eval.answering import Settings, methods_of
            from dustin_hf.eval.efficiency.texts import load_pair, load_tokenizer
            from dustin_hf.eval.ruler import TASKS, ruler_samples
            from dustin_hf.eval.ruler.run import run_ruler
            from dustin_hf.eval.ruler.tasks import task_of
            from dustin_hf.texts import read_texts

            methods = methods_of(method or ["full", "hybrid"], budget or [512])
            # before models are loaded
            settings = Settings(gamma, batch, draft_cache)
            names = list(dict.fromkeys(task_of(name).name for name in task or TASKS))
            lengths = list(dict.fromkeys(length or [4096, 8192]))
            made = ruler_samples(load_tokenizer(target), names, lengths, read_texts(texts), samples, chat=chat)
            loaded = None if profile is None else read_profile(profile)
            models = load_pair(target, draft, the_device(device), max(lengths))
            with bars() as progress:
                found = run_ruler(*models, made, methods, out, settings, loaded, command_line(), progress)
            report(found)


def report(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Print scores as a table: a row for each method and task, a column for each length."""
    lengths = list(dict.fromkeys(n for tasks in found.values() for cells in tasks.values() for n in cells))
    rows = [
        (name, task, *(f"{cells[n]:.1f}" if n in cells else "-" for n in lengths))
        for name, tasks in found.items()
        for task, cells in tasks.items()
    ]
    show("RULER-style scores, 0 to 100", ("method", "task", *lengths), rows)
