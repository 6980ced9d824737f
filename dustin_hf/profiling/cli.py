"""The commands `dustin-hf profile` and `dustin-hf fidelity`."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dustin_hf.tables import show

if TYPE_CHECKING:
    from typer import Typer

# What `profile --quick` takes instead of the defaults: minutes with a small pair on a CPU, and a rough answer.
QUICK = {"new_tokens": 32, "needle_lengths": (512,), "trials": 10, "max_context": 2048}
QUICK_TEXTS = 4


def add_commands(commands: "Typer") -> None:
    """Register both commands."""
    import typer

    from dustin_hf import options
    from dustin_hf.console import bars, command_line, needs, one_line_errors, read_profile, the_device

    @commands.command()
    def profile(
        target: options.Target,
        draft: options.Draft,
        out: options.RunOut,
        texts: Annotated[
            Path | None,
            typer.Option(
                help="Folder or file: .txt, .txt.gz, .jsonl. Default: LongReward-10k, which is downloaded; "
                "with --quick four book excerpts."
            ),
        ] = None,
        samples: Annotated[int | None, typer.Option(min=2, help="Most texts. Default: all of --texts, or 32.")] = None,
        budget: Annotated[
            list[int] | None,
            typer.Option(help="Cached tokens that verification attends to; repeatable. Default: 128, 256, 512."),
        ] = None,
        gamma: options.Gamma = 4,
        max_context: Annotated[
            int | None, typer.Option(min=2, help="Tokens that longer texts are cut to. Default: they are an error.")
        ] = None,
        new_tokens: Annotated[
            int | None, typer.Option(min=1, help="Tokens of each continuation. Default: 128.")
        ] = None,
        trials: Annotated[int | None, typer.Option(min=1, help="Tried splits per budget. Default: 40.")] = None,
        batch: Annotated[
            int | None, typer.Option(min=1, help="Texts recorded at once. Default: 8 on CUDA, else 1.")
        ] = None,
        compare: Annotated[
            bool, typer.Option("--compare", help="Report too: fewer heads, layer groups, other needles.")
        ] = False,
        layer_groups: Annotated[
            int, typer.Option(min=1, help="Groups of target layers with sets of their own; 1 is the paper's.")
        ] = 1,
        chat: Annotated[bool, typer.Option("--chat", help="Give each text as a user's message.")] = False,
        quick: Annotated[
            bool, typer.Option("--quick", help="Few short texts and trials; what else is given still counts.")
        ] = False,
        plots: Annotated[Path | None, typer.Option(help="Folder for figures (needs matplotlib).")] = None,
        device: options.Device = None,
    ) -> None:
        """Find which heads of a pair estimate attention, and how to split the budget: a profile, and a report."""
        with one_line_errors():
            from dustin_hf.eval.efficiency.texts import load_pair
            from dustin_hf.profiling.plots import plot_study
            from dustin_hf.profiling.study import profile_pair, validation_texts
            from dustin_hf.texts import BUILT_IN

            needs("optuna")
            if plots is not None:
                needs("matplotlib")
            settings: dict[str, Any] = dict(QUICK) if quick else {}
            given = {"max_context": max_context, "new_tokens": new_tokens, "trials": trials, "batch_size": batch}
            settings |= {name: value for name, value in given.items() if value is not None}
            settings |= {"chat": chat, "compare": compare, "layer_groups": layer_groups}
            if quick:
                texts, samples = texts or BUILT_IN, samples or QUICK_TEXTS
            found_texts = validation_texts(texts, samples)
            models = load_pair(target, draft, the_device(device))
            with bars() as progress:
                found = profile_pair(
                    *models,
                    found_texts,
                    out,
                    budgets=budget or (128, 256, 512),
                    gamma=gamma,
                    command=command_line(),
                    progress=progress,
                    say=partial(typer.echo, err=True),
                    **settings,
                )
            typer.echo(f"target heads {found.target_heads}\ndraft heads {found.draft_heads}")
            typer.echo(f"draft share {found.draft_share:.3f}\nprofile and report are in {out}")
            if plots is not None:
                drawn = plot_study(out, plots)
                found.save_pretrained(out, [path for path in drawn if path.suffix == ".png"])  # the card shows them
                _say_drawn(drawn, plots)

    @commands.command()
    def fidelity(
        target: options.Target,
        draft: options.Draft,
        texts: Annotated[
            Path | None, typer.Option(help="Folder or file: .txt, .txt.gz, .jsonl. Default: four book excerpts.")
        ] = None,
        profile: options.Profile = None,
        budget: Annotated[
            list[int] | None,
            typer.Option(help="Cached tokens that verification attends to; repeatable. Default: 128, 512."),
        ] = None,
        mode: Annotated[
            list[str] | None,
            typer.Option(
                help="hybrid, target, draft, streaming, oracle, oracle-layers, full, or a registered policy; "
                "repeatable. Default: the first five."
            ),
        ] = None,
        context: Annotated[int, typer.Option(min=1, help="Tokens of each context.")] = 1024,
        whole: Annotated[
            bool, typer.Option("--whole", help="A text is one context, its middle cut to --context, not several.")
        ] = False,
        samples: Annotated[int, typer.Option(min=1, help="Contexts, taken from all texts in turn.")] = 4,
        new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each continuation.")] = 128,
        gamma: options.Block = 4,
        batch: Annotated[int, typer.Option(min=1, help="Contexts that are run at once.")] = 1,
        out: options.ResultOut = None,
        force: options.Force = False,
        plots: Annotated[Path | None, typer.Option(help="Folder for figures (needs --out and matplotlib).")] = None,
        device: options.Device = None,
    ) -> None:
        """Replay continuations of the full cache under sparse verification: agreement, KL, attention recovery."""
        with one_line_errors():
            from dustin_hf.eval.efficiency.record import conditions
            from dustin_hf.eval.efficiency.texts import load_pair, load_tokenizer
            from dustin_hf.eval.fidelity import measure
            from dustin_hf.eval.fidelity.policies import check_arms
            from dustin_hf.eval.parts import Parts
            from dustin_hf.profiling.plots import plot_fidelity
            from dustin_hf.texts import read_texts

            if plots is not None:
                needs("matplotlib")
                if out is None:
                    raise ValueError("--plots draws what --out holds: give both")
            parts = Parts(out, force, command_line())
            budgets, modes = budget or (128, 512), mode or measure.MODES
            check_arms(modes, budgets, measure.SINKS, measure.WINDOW)  # before models are loaded
            found_texts = read_texts(texts)
            loaded = None if profile is None else read_profile(profile)
            contexts = cut(found_texts, load_tokenizer(target), context, samples, whole)
            longest = max(map(len, contexts.values())) + new_tokens
            first, second, _ = load_pair(target, draft, the_device(device), longest, longest)
            with bars() as progress:
                result = measure.fidelity(
                    first,
                    second,
                    contexts,
                    loaded,
                    budgets,
                    modes,
                    new_tokens,
                    gamma=gamma,
                    batch_size=batch,
                    parts=parts,
                    progress=progress,
                )
            _report(result)
            parts.save({"conditions": conditions(command_line()), **result})
            if plots is not None and out is not None:
                _say_drawn(plot_fidelity(out, plots), plots)


def cut(
    texts: Mapping[str, str], tokenizer: Any, context: int, samples: int, whole: bool = False
) -> dict[str, list[int]]:
    """Contexts of `context` tokens by name, from all texts in turn, none overlapping another.

    With `whole` the first texts as they are, without the middle of longer ones.

    Raises:
        ValueError: if the texts are too short or too few.
    """
    from dustin_hf.eval.efficiency.texts import cut_prompts
    from dustin_hf.profiling.study import without_middle
    from dustin_hf.texts import first_ids

    if whole:
        if empty := [name for name, text in texts.items() if not text.strip()]:
            raise ValueError(f"--texts hold nothing in {', '.join(empty[:5])}: leave them out")
        if len(texts) < samples:
            raise ValueError(f"--texts hold {len(texts)} texts, {samples} are asked for: lower --samples")
        chosen = list(texts.items())[:samples]
        return {name: without_middle(tokenizer(text, verbose=False)["input_ids"], context) for name, text in chosen}
    front = first_ids(tokenizer)
    size = context - len(front)
    if size < 1:
        raise ValueError(f"--context must be above the {len(front)} tokens that start a text, got {context}")
    rows = tokenizer(list(texts.values()), add_special_tokens=False, verbose=False)["input_ids"]
    found = sum(len(row) // size for row in rows)
    if found < samples:
        raise ValueError(
            f"--texts hold {found} contexts of {context:,} tokens, {samples} are asked for: give more or longer texts, "
            "or lower --context or --samples"
        )
    prompts = cut_prompts(dict(zip(texts, rows)), [size] * samples)
    return {f"{prompt.source}@{prompt.start}": [*front, *prompt.tokens] for prompt in prompts}


def _report(result: Mapping[str, Any]) -> None:
    """Print means as a table."""
    rows = []
    for row in result["results"]:
        figures = (
            "-" if row[name] is None else f"{row[name]:.4f}" for name in ("agreement", "kl", "arr", "arr_committed")
        )
        rows.append((row["mode"], "-" if row["budget"] is None else str(row["budget"]), *figures))
    show("Replay beside the full cache", ("mode", "budget", "agreement", "KL", "ARR", "ARR, committed"), rows)
    for over, found in result["pearson"].items():
        if found.get("arr") is not None:
            print(f"Pearson correlation of KL and ARR over {over}: {found['arr']:.3f}")


def _say_drawn(paths: Sequence[Path], folder: Path) -> None:
    import typer

    typer.echo(f"{len(paths)} figures are in {folder}")
