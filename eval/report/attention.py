"""Results of `bench kernels`, `overhead` and `prefill`: the paper's figures 7, 8 and 10, and the numbers in them."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from dustin_hf.eval.report.captions import measured, model_name, notes
from dustin_hf.eval.report.figures import draw_attention, draw_estimators
from dustin_hf.eval.report.layout import Drawing, Section, Table, number, slug, tokens
from dustin_hf.eval.report.sources import Source

# As the paper's figure 8 names and orders them.
ESTIMATORS = {"hybrid": "Dustin-H", "target": "Dustin-T", "draft": "Dustin-D", "quest-16": "Quest-16", "naive": "Naive"}


def kernel_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each pair of each result of `bench kernels`."""
    sections = []
    for source in sources:
        pairs = dict.fromkeys((step["shape"], step["draft"]) for step in source.content["steps"])
        sections += [_attention(source, *pair) for pair in pairs]
    return sections


def _attention(source: Source, target: str, draft: str) -> Section:
    steps = [step for step in source.content["steps"] if (step["shape"], step["draft"]) == (target, draft)]
    steps.sort(key=lambda step: (step["context"], step["batch"]))
    options = source.content["options"]
    rows = []
    for step in steps:
        full = _full_us(step)
        rows.append(
            (
                tokens(step["context"]),
                str(step["batch"]),
                *(number(us / 1e3, 3) for us in (full, step["sparse_us"], step["select_us"], step["step_us"])),
                number(step["times_packed_best"]),
                number(step["times_unpacked_flash"]),
                *(number(100 * step["select_us"] / us) for us in (full, step["sparse_us"])),
            )
        )
    about = "Acceptance plays no part: nothing is decoded."
    table = Table(
        f"attention-{slug(target)}",
        f"Self-attention of verification, {target} (the numbers of the paper's figures 7 and 10)",
        ("Context", "Batch", "full ms", "sparse ms", "estimation ms", "Dustin ms", "speedup", "over unpacked flash")
        + ("estimation % of full", "estimation % of sparse"),
        tuple(rows),
        "Attention of one verification in all target layers. full: over the whole cache, the faster of our packed "
        "kernel and packed SDPA, which speedup is over; over unpacked flash: the same against flash attention as a "
        f"plain forward calls it. Dustin: sparse attention and estimation. {about}",
    )
    points = [
        (f"{step['batch']} x {tokens(step['context'])}", _full_us(step), step["sparse_us"], step["select_us"])
        for step in steps
    ]
    caption = (
        f"Self-attention of verification of {target}, in percent of attention over the full cache (as the paper's "
        f"figures 7 and 10; the former has two of the latter's points). {about}"
    )
    drawing = Drawing(f"fig7-fig10-attention-{slug(target)}", caption, partial(draw_attention, points, target))
    conditions = (
        f"Target {target}, draft {draft}, {options['dtype']}, random inputs; gamma {options['gamma']}, budget "
        f"{options['budget']}. {measured([source], [source.content['conditions']])} Notes of the run: {notes([source])}"
    )
    return Section(f"Self-attention: {target}", conditions, (table,), (drawing,))


def _full_us(step: Mapping[str, Any]) -> float:
    """What `times_packed_best` is against."""
    return min(us for us in (step["packed_ours_us"], step["packed_sdpa_us"]) if us is not None)


def overhead_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each result of `bench overhead`."""
    return [_overhead(source) for source in sources]


def _overhead(source: Source) -> Section:
    content = source.content
    target, draft = model_name(content["target"]), model_name(content["draft"])
    rows = {(row["estimator"], row["context"]): row for row in content["rows"]}
    contexts = sorted({context for _, context in rows})
    order = [*ESTIMATORS, *dict.fromkeys(name for name, _ in rows if name not in ESTIMATORS)]
    names = [name for name in order if any(name == held for held, _ in rows)]

    def cells(name: str, context: int) -> tuple[str, str]:
        row = rows.get((name, context))
        return (number(row["us"], 1), number(100 * row["share"])) if row else (number(None), number(None))

    def attention(context: int) -> tuple[str, str]:
        found = {row["attention_us"] for (_, held), row in rows.items() if held == context}
        return number(found.pop() if len(found) == 1 else None, 1), number(100)

    lines = [("full-cache attention", *(cell for context in contexts for cell in attention(context)))]
    lines += [
        (ESTIMATORS.get(name, name), *(x for context in contexts for x in cells(name, context))) for name in names
    ]
    table = Table(
        f"estimation-{slug(target)}",
        f"Estimation of importance, {target} (the numbers of the paper's figure 8)",
        ("Estimator", *(f"{tokens(context)} {column}" for context in contexts for column in ("us", "%"))),
        tuple(lines),
        "us: microseconds of one estimation; %: of self-attention over the full cache. Dustin-T scores heads of the "
        "target only, Dustin-D of the draft, Dustin-H of both; Quest-16 bounds pages of 16; Naive scores all heads of "
        "both models. Acceptance plays no part: nothing is decoded.",
    )
    shares = {
        (name, ESTIMATORS.get(name, name)): [
            (context, rows[name, context]["share"]) for context in contexts if (name, context) in rows
        ]
        for name in names
    }
    caption = (
        f"Latency of one estimation over that of full-cache self-attention, {target}({draft}), batch "
        f"{content['batch']} (as the paper's figure 8). Acceptance plays no part: nothing is decoded."
    )
    drawing = Drawing(f"fig8-estimation-{slug(target)}", caption, partial(draw_estimators, shares, target))
    conditions = (
        f"Target {target}, draft {draft}; batch {content['batch']}. {measured([source], [content['conditions']])} "
        f"Notes of the run: {notes([source])}"
    )
    return Section(f"Estimation of importance: {target}", conditions, (table,), (drawing,))


def prefill_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each result of `bench prefill`, which the paper has nothing like."""
    return [_prefill(source) for source in sources]


def _prefill(source: Source) -> Section:
    content = source.content
    target, context = model_name(content["target"]), tokens(content["context"])
    table = Table(
        f"prefill-{slug(target)}",
        f"Prefill of {target}, {context} tokens a row (ours)",
        ("Way", "Prompts", "s", "tok/s", "peak GB", "over stock"),
        tuple(
            (
                row["arm"],
                str(row["prompts"]),
                number(row["seconds"]),
                number(row["tokens_per_s"], 0),
                number(row["peak_gb"], 1),
                number(row.get("over_stock")),
            )
            for row in content["rows"]
        ),
        "peak GB holds weights and caches. over stock: tok/s over those of the faster stock way. Acceptance plays no "
        "part: nothing is drafted.",
    )
    conditions = f"Model {target}. {measured([source], [content['conditions']])} Notes of the run: {notes([source])}"
    return Section(f"Prefill: {target}", conditions, (table,))
