"""The commands `dustin-hf bench ...`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

if TYPE_CHECKING:
    from typer import Typer

T = TypeVar("T")


def bench_app() -> "Typer":
    """The commands. Built on call, as those of `dustin_hf.cli`."""
    import typer

    from dustin_hf import options
    from dustin_hf.console import command_line, one_line_errors

    commands = typer.Typer(help="Measure speed on a CUDA device.", no_args_is_help=True)

    @commands.command()
    def kernels(
        shape: Annotated[
            list[str] | None, typer.Option(help="Target whose layers are measured; repeatable. Default: qwen2.5-72b.")
        ] = None,
        context: Annotated[
            list[int] | None, typer.Option(min=1, help="Tokens per row; repeatable. Default: 8192, 16384, 32768.")
        ] = None,
        batch: options.Rows = None,
        gamma: options.Gamma = 4,
        budget: options.Budget = 512,
        out: options.ResultOut = None,
        force: options.Force = False,
    ) -> None:
        """Time every kernel beside its floor and its baselines, and the self-attention of a step."""
        from dustin_hf.eval.efficiency import kernels as bench
        from dustin_hf.eval.parts import Parts

        with one_line_errors():
            parts = Parts(out, force, command_line())
            result = bench.run_kernels(
                _once(shape or bench.SHAPE_NAMES),
                _once(context or bench.CONTEXTS),
                _once(batch or bench.BATCHES),
                gamma,
                budget,
                command_line(),
                lambda text: typer.echo(text, err=True),
                parts,
            )
            parts.save(result)
            bench.report(result)

    @commands.command()
    def decode(
        shape: Annotated[
            str | None, typer.Option(help="Target with random weights and its default draft, as for `kernels`.")
        ] = None,
        target: Annotated[str | None, typer.Option(help="Real target: folder or Hub id. Needs --draft.")] = None,
        draft: Annotated[str | None, typer.Option(help="Real draft: folder or Hub id.")] = None,
        context: Annotated[
            list[int] | None, typer.Option(min=2, help="Tokens per row; repeatable. Default: 8192, 16384, 32768.")
        ] = None,
        batch: options.Rows = None,
        gamma: options.Gamma = 3,
        budget: options.Budget = 512,
        arms: Annotated[str | None, typer.Option(help="Names, with commas. Default: all but hf-static.")] = None,
        tau: Annotated[
            list[float] | None,
            typer.Option(help="Simulated tokens per step, with --shape only; repeatable. Default: 2.2."),
        ] = None,
        ragged: Annotated[bool, typer.Option("--ragged", help="Rows from half the context to all of it.")] = False,
        texts: Annotated[
            Path | None,
            typer.Option(help="Folder of .txt or .txt.gz files, with --target only. Default: four book excerpts."),
        ] = None,
        new_tokens: Annotated[
            int | None, typer.Option(help="Tokens that each row gets, with --target only. Default: 128.")
        ] = None,
        out: options.ResultOut = None,
        force: options.Force = False,
    ) -> None:
        """Time whole steps of every arm beside their floors: random weights, or real models on real text."""
        from dustin_hf.eval.efficiency import decode as bench
        from dustin_hf.eval.efficiency.kernels import BATCHES, CONTEXTS
        from dustin_hf.eval.efficiency.real import REAL_ARMS, run_real
        from dustin_hf.eval.efficiency.shapes import pair_of
        from dustin_hf.eval.efficiency.texts import EXCERPTS, load_pair, read_texts
        from dustin_hf.eval.efficiency.timing import check_cuda
        from dustin_hf.eval.parts import Parts
        from dustin_hf.texts import first_ids

        points, batches = _once(context or CONTEXTS), _once(batch or BATCHES)

        def say(text: str) -> None:
            typer.echo(text, err=True)

        with one_line_errors():
            _check_modes(shape, target, draft, {"--tau": tau or None}, {"--texts": texts, "--new-tokens": new_tokens})
            names = _arms(arms, REAL_ARMS if shape is None else (*bench.STOCK_ARMS, *bench.ARMS))
            parts = Parts(out, force, command_line())
            if target is not None and draft is not None:
                check_cuda()
                models = load_pair(target, draft)
                result = run_real(
                    *models[:2],
                    read_texts(texts or EXCERPTS, models[2]),
                    points,
                    batches,
                    gamma,
                    budget,
                    names,
                    128 if new_tokens is None else new_tokens,
                    command_line(),
                    progress=say,
                    ragged=ragged,
                    parts=parts,
                    front=first_ids(models[2]),
                )
            else:
                result = bench.run_decode(
                    *pair_of(str(shape)),
                    points,
                    batches,
                    gamma,
                    budget,
                    names,
                    _once(tau or [2.2]),
                    command_line(),
                    ragged,
                    say,
                    parts,
                )
            parts.save(result)
            bench.report(result)

    @commands.command()
    def prefill(
        shape: Annotated[str, typer.Option(help="Model with random weights.")] = "qwen2.5-7b",
        context: Annotated[int, typer.Option(min=2, help="Tokens per row.")] = 32768,
        rows: Annotated[int, typer.Option(min=1, help="Rows of the comparison with stock.")] = 4,
        batch: Annotated[int, typer.Option(min=1, help="Rows of the last line, ours alone.")] = 16,
        chunk: Annotated[list[int] | None, typer.Option(min=1, help="Tokens per forward to try; repeatable.")] = None,
        out: options.ResultOut = None,
        force: options.Force = False,
    ) -> None:
        """Time the prefill of long prompts beside stock's."""
        from dustin_hf.eval.efficiency import prefill as bench
        from dustin_hf.eval.efficiency.record import check_free, save
        from dustin_hf.eval.efficiency.shapes import SHAPES

        with one_line_errors():
            if shape not in SHAPES:
                raise ValueError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
            if out is not None:
                check_free(out, force)
            result = bench.run_prefill(
                SHAPES[shape],
                context,
                rows,
                batch,
                _once(chunk or []),
                command_line(),
                lambda text: typer.echo(text, err=True),
            )
            if out is not None:
                save(out, result, force)
            bench.report(result)

    @commands.command()
    def overhead(
        shape: Annotated[str, typer.Option(help="Target whose layers are measured, with its default draft.")] = (
            "qwen2.5-72b"
        ),
        context: Annotated[
            list[int] | None, typer.Option(min=1, help="Tokens per row; repeatable. Default: 4096 to 65536.")
        ] = None,
        batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 8,
        gamma: options.Gamma = 4,
        budget: options.Budget = 512,
        out: options.ResultOut = None,
        force: options.Force = False,
    ) -> None:
        """Time what estimating importance costs, by several estimators, over full-cache attention."""
        from dustin_hf.eval.efficiency import overhead as bench
        from dustin_hf.eval.efficiency.shapes import pair_of
        from dustin_hf.eval.parts import Parts

        with one_line_errors():
            parts = Parts(out, force, command_line())
            result = bench.run_overhead(
                *pair_of(shape),
                _once(context or bench.CONTEXTS),
                batch,
                gamma,
                budget,
                command_line(),
                lambda text: typer.echo(text, err=True),
                parts,
            )
            parts.save(result)
            bench.report(result)

    return commands


def _once(values: Sequence[T]) -> list[T]:
    """The values in their order, one that was given again only once."""
    return list(dict.fromkeys(values))


def _check_modes(
    shape: str | None, target: str | None, draft: str | None, simulated: dict[str, Any], real: dict[str, Any]
) -> None:
    """Raise `ValueError` unless either a shape or a real pair is given, and no option of the other."""
    if (shape is None) == (target is None and draft is None):
        raise ValueError("give either --shape, or --target with --draft")
    if shape is None and (target is None or draft is None):
        raise ValueError("--target and --draft must be given together")
    wrong, needed = (simulated, "--shape") if shape is None else (real, "--target")
    for option, value in wrong.items():
        if value is not None:
            raise ValueError(f"{option} goes with {needed} only")


def _arms(text: str | None, known: Sequence[str]) -> list[str]:
    """The names in `text`; all but hf-static without one.

    Raises:
        ValueError: on a name that is not known.
    """
    names = [name for name in known if name != "hf-static"] if text is None else text.replace(" ", "").split(",")
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(f"--arms must be of {', '.join(known)}, got {', '.join(unknown)}")
    return _once(names)
