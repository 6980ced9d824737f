"""The command `dustin-hf pg19`."""

from collections.abc import Mapping
from dataclasses import asdict
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
    def pg19(
        target: options.Target,
        draft: options.Draft,
        texts: Annotated[
            Path | None,
            typer.Option(help="Folder or file of books: .txt, .txt.gz, .jsonl. Default: PG-19."),
        ] = None,
        context: Annotated[int, typer.Option(min=2, help="Tokens of each context.")] = 8192,
        samples: Annotated[int, typer.Option(min=1, help="Passages, taken from all books in turn.")] = 8,
        budget: Annotated[
            list[int] | None, typer.Option(help="Cached tokens that are read; repeatable. Default: 128, 512.")
        ] = None,
        mode: Annotated[
            list[str] | None,
            typer.Option(
                help="Policies, as for fidelity; repeatable. Default: full, hybrid, target, draft, streaming."
            ),
        ] = None,
        new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the book that are predicted.")] = 256,
        drift_tokens: Annotated[
            int, typer.Option("--drift", min=0, help="New tokens of a free run, judged by the full cache; 0: none.")
        ] = 0,
        gamma: options.Block = 4,
        batch: Annotated[int, typer.Option(min=1, help="Passages that are run at once.")] = 1,
        profile: options.Profile = None,
        out: options.ResultOut = None,
        force: options.Force = False,
        device: options.Device = None,
    ) -> None:
        """Perplexity of books under sparse verification, and the drift of long outputs."""
        from dustin_hf.console import bars, command_line, needs, one_line_errors, read_profile, the_device

        with one_line_errors():
            from dustin_hf.eval.efficiency.record import conditions
            from dustin_hf.eval.efficiency.texts import load_pair, load_tokenizer
            from dustin_hf.eval.fidelity.measure import SINKS, WINDOW
            from dustin_hf.eval.fidelity.policies import check_arms
            from dustin_hf.eval.parts import Parts
            from dustin_hf.eval.pg19.books import load_books, passages
            from dustin_hf.eval.pg19.drift import drift
            from dustin_hf.eval.pg19.perplexity import MODES, perplexity
            from dustin_hf.profile import DustinProfile
            from dustin_hf.profiling.traces import fingerprint

            if drift_tokens:
                needs("rapidfuzz")
            parts = Parts(out, force, command_line())
            budgets, modes = budget or [128, 512], mode or list(MODES)
            check_arms(modes, budgets, SINKS, WINDOW)  # before models are loaded
            books = load_books(texts)
            loaded = None if profile is None else read_profile(profile)
            tokenizer = load_tokenizer(target)
            chosen = passages(books, tokenizer, context, new_tokens, samples)
            stories = passages(books, tokenizer, context, drift_tokens, samples, story=True) if drift_tokens else []
            read, told = (
                max((len(passage.context) + len(passage.following) for passage in of), default=0)
                for of in (chosen, stories)
            )
            first, second, _ = load_pair(target, draft, the_device(device), max(read, told), read)
            configs = [model.config.get_text_config(decoder=True) for model in (first, second)]
            used = loaded or DustinProfile.of_pair(*configs)
            used.check_pair(*configs)
            inputs = [asdict(passage) for passage in (*chosen, *stories)]
            parts.begin(fingerprint(first), fingerprint(second), inputs, used.to_dict())
            with bars() as progress:
                result: dict[str, Any] = {
                    "bench": "pg19",
                    "conditions": conditions(command_line()),
                    "settings": {
                        "target": Path(first.config.name_or_path).name,
                        "draft": Path(second.config.name_or_path).name,
                        "context": context,
                        "new_tokens": new_tokens,
                        "gamma": gamma,
                        "profile": used.to_dict(),
                    },
                    "passages": [passage.name for passage in chosen],
                    "perplexity": perplexity(
                        first, second, chosen, used, budgets, modes, gamma, batch, parts, progress
                    ),
                }
                if drift_tokens:
                    # a window is the drafts and one token more
                    drafted = max(1, gamma - 1)
                    result["drift"] = drift(
                        first, second, stories, used, budgets, drift_tokens, drafted, parts, progress
                    )
            report(result)
            parts.save(result)


def report(result: Mapping[str, Any]) -> None:
    """Print both tables."""

    def budget_of(row: Mapping[str, Any]) -> str:
        return "-" if row["budget"] is None else str(row["budget"])

    found = [(row["mode"], budget_of(row), f"{row['perplexity']:.3f}") for row in result["perplexity"]]
    show("Perplexity of the books", ("mode", "budget", "perplexity"), found)
    rows = []
    names = ("agreement", "perplexity", "repeated", "rouge_l")
    for row in result.get("drift", ()):
        for i, part in enumerate(row["parts"]):
            first = (budget_of(row), f"{row['tau']:.2f}", f"{row['tokens_per_s']:.0f}") if i == 0 else ("", "", "")
            figures = (f"{part[name]:.3f}" for name in names)
            rows.append((*first, str(i + 1), *figures))
    if rows:
        columns = ("budget", "tau", "tokens/s", "part", *names)
        show("Drift of free runs, by the full cache", columns, rows)
