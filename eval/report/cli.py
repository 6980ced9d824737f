"""The command `dustin-hf report`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from typer import Typer


def add_commands(commands: "Typer") -> None:
    """Register the command."""
    import typer

    @commands.command()
    def report(
        runs: Annotated[
            list[Path],
            typer.Argument(
                help="Folders of longbench or ruler runs or studies, JSON of bench, fidelity, pg19, or a folder.",
                show_default=False,
            ),
        ],
        out: Annotated[Path, typer.Option(help="Folder of the report; it must be empty, or new.")],
        force: Annotated[
            bool, typer.Option("--force", help="Overwrite an earlier report there, and only that.")
        ] = False,
    ) -> None:
        """Turn saved runs into the paper's tables and figures, with their conditions."""
        from dustin_hf.console import needs, one_line_errors

        with one_line_errors():
            from dustin_hf.eval.report.write import write_report

            needs("matplotlib")
            files = write_report(runs, out, force)
            kinds = [sum(path.suffix == suffix for path in files) for suffix in (".csv", ".png")]
            typer.echo(f"{kinds[0]} tables and {kinds[1]} figures are in {out}, README.md shows them")
