"""PG-19 runs: perplexity of books under each policy and budget, and how long outputs drift."""

from collections.abc import Sequence

from dustin_hf.eval.report.captions import heads, measured, model_name
from dustin_hf.eval.report.layout import Section, Table, number, slug
from dustin_hf.eval.report.sources import Source


def book_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each result of `pg19`."""
    return [_books(source) for source in sources]


def _books(source: Source) -> Section:
    content, settings = source.content, source.content["settings"]
    target, draft = model_name(settings["target"]), model_name(settings["draft"])
    tables = [
        Table(
            f"perplexity-{slug(target)}",
            f"Perplexity of books under sparse verification, {target} (paper section 5.3.2)",
            ("Policy", "Budget", "Perplexity"),
            tuple(
                (row["mode"], number(row["budget"], 0), number(row["perplexity"], 3)) for row in content["perplexity"]
            ),
            "Of the tokens that follow each context in the book, read by a real sparse run.",
        )
    ]
    if content.get("drift"):
        held = content["drift"][0]["parts"][0]
        names = [name for name in ("agreement", "perplexity", "repeated", "rouge_l") if name in held]
        rows = [
            (number(row["budget"], 0), number(row["tau"], 2), str(i), *(number(part[name], 3) for name in names))
            for row in content["drift"]
            for i, part in enumerate(row["parts"], 1)
        ]
        tables.append(
            Table(
                f"drift-{slug(target)}",
                f"Drift of long outputs, {target} (paper section 5.3.2)",
                ("Budget", "tau", "Part", *(name.replace("_", " ") for name in names)),
                tuple(rows),
                "Parts of 512 new tokens of free runs; - is the lossless run. agreement: share of the part's tokens "
                "that the full cache would have chosen after the same text; perplexity: of the output to the full "
                "cache; repeated: share of its 8-grams that the output had before; rouge l: F measure over the tokens "
                "up to the part's end, against how the book goes on.",
            )
        )
    conditions = (
        f"Target {target}, draft {draft}; {len(content['passages'])} passages, contexts of {settings['context']} "
        f"tokens, {settings['new_tokens']} predicted; gamma {settings['gamma']}; {heads(settings['profile'])}. "
        + measured([source], [content["conditions"]])
    )
    if content.get("note"):
        conditions += f" Note of the run: {content['note']}"
    return Section(f"Books: {target} with {draft}", conditions, tuple(tables))
