"""The commands `dustin-hf bench ...`."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from typer import Typer


def bench_app() -> "Typer":
    """The commands. Built on call, as those of `dustin_hf.cli`."""
    import typer

    from dustin_hf.cli import errors_end_it

    commands = typer.Typer(help="Measure speed on a CUDA device.", no_args_is_help=True)

    @commands.command()
    def kernels(
        shape: Annotated[
            list[str] | None, typer.Option(help="Target whose layers are measured; repeatable. Default: qwen2.5-72b.")
        ] = None,
        context: Annotated[
            list[int] | None, typer.Option(min=1, help="Tokens per row; repeatable. Default: 8192, 16384, 32768.")
        ] = None,
        batch: Annotated[list[int] | None, typer.Option(min=1, help="Rows; repeatable. Default: 8, 16.")] = None,
        gamma: Annotated[int, typer.Option(min=1, help="Drafted tokens per step.")] = 4,
        budget: Annotated[int, typer.Option(help="Cached tokens that verification attends to.")] = 512,
        out: Annotated[Path | None, typer.Option(help="JSON file for the result.")] = None,
        force: Annotated[bool, typer.Option("--force", help="Overwrite that file.")] = False,
    ) -> None:
        """Time every kernel beside its floor and its baselines, and the self-attention of a step."""
        from dustin_hf.eval.efficiency import kernels as bench
        from dustin_hf.eval.efficiency.record import check_free, save

        with errors_end_it():
            if out is not None:
                check_free(out, force)
            result = bench.run_kernels(
                shape or bench.SHAPE_NAMES,
                context or bench.CONTEXTS,
                batch or bench.BATCHES,
                gamma,
                budget,
                command_line(),
                lambda text: typer.echo(text, err=True),
            )
            if out is not None:
                save(out, result, force)
            bench.report(result)

    return commands


def command_line() -> str:
    """The command as typed, without the place of the program."""
    return shlex.join(["dustin-hf", *sys.argv[1:]])
