"""Fidelity runs and studies: agreement, KL and attention recovery by policy and budget, and the paper's table 4."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from dustin_hf.eval.report.captions import heads, measured, model_name
from dustin_hf.eval.report.layout import MISSING, Drawing, Section, Table, number, slug
from dustin_hf.eval.report.sources import Source
from dustin_hf.profiling.plots import plot_fidelity, plot_study

RATES = (("ARR", "arr"), ("ARR, committed", "arr_committed"))


def fidelity_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each result of `fidelity`."""
    return [_fidelity(source) for source in sources]


def _fidelity(source: Source) -> Section:
    content, settings = source.content, source.content["settings"]
    target, draft = model_name(settings["target"]), model_name(settings["draft"])
    about = f"Acceptance plays no part: the tokens are given. {content['definition']}"
    columns = (("agreement", "agreement"), ("KL, nats", "kl"), *RATES)
    results = Table(
        f"fidelity-{slug(target)}",
        f"Replay of {target} under each policy and budget (ours)",
        ("Policy", "Budget", *(title for title, _ in columns)),
        tuple(
            (row["mode"], number(row["budget"], 0), *(number(row[name], 4) for _, name in columns))
            for row in sorted(content["results"], key=lambda row: row["budget"] or 0)
        ),
        about,
    )
    correlation = Table(
        f"correlation-{slug(target)}",
        f"Correlation of KL and attention recovery, {target} (as the paper's table 4)",
        ("Over", *(f"KL and {title}" for title, _ in RATES)),
        tuple(
            (over, *(number(content["pearson"][over].get(name), 4) for _, name in RATES)) for over in content["pearson"]
        ),
        "Pearson's, over the policies and budgets above; contexts K: within each context at budget K, and the mean "
        "over contexts, as the paper has it for one context, with sampled sets of tokens in place of policies. "
        f"{about}",
    )
    caption = "KL and attention recovery (as the paper's figure 9), both by budget, and KL along the text (ours)."
    drawing = Drawing(f"replay-{slug(target)}", f"{caption} {about}", partial(plot_fidelity, source.path))
    lengths = [context["tokens"] for context in content["contexts"]]
    conditions = (
        f"Target {target}, draft {draft}, {settings['dtype'].removeprefix('torch.')}; {len(lengths)} contexts of "
        f"{min(lengths)} to {max(lengths)} tokens, {settings['new_tokens']} new tokens; gamma {settings['gamma']}, "
        f"{settings['sinks']} sinks, window {settings['window']}; {heads(settings['profile'])}. "
        + measured([source], [content.get("conditions")])
    )
    return Section(f"Fidelity: {target} with {draft}", conditions, (results, correlation), (drawing,))


def study_sections(sources: Sequence[Source]) -> list[Section]:
    """A section for each report of a study."""
    return [_study(source) for source in sources]


def _study(source: Source) -> Section:
    content, settings = source.content, source.content["settings"]
    metadata = content["profile"].get("metadata", {})
    target, draft = (model_name(metadata.get(name, {}).get("id", "not recorded")) for name in ("target", "draft"))
    budgets = sorted(content["arr"], key=int)
    policies = dict.fromkeys(policy for table in content["arr"].values() for policy in table)
    about = f"Acceptance plays no part: the tokens are given. {content['definition']}"
    rates = Table(
        f"arr-{slug(target)}",
        f"Attention recovery rate by policy and budget, {target} (the numbers of the paper's figures 2 to 4)",
        ("Policy", *(f"{title}, k = {budget}" for budget in budgets for title, _ in RATES)),
        tuple(
            (
                policy.replace("_", " "),
                *(number(content["arr"][k].get(policy, {}).get(name), 4) for k in budgets for _, name in RATES),
            )
            for policy in policies
        )
        + _by_groups(content, budgets),
        about,
    )
    caption = "Recovery by budget and by layer (as the paper's figures 2 to 4), and the search. "
    drawing = Drawing(f"study-{slug(target)}", caption + about, partial(plot_study, source.path))
    held_out, texts = len(content["held_out"]), len(content["held_out"]) + len(content["searched"])
    said = f"Target {target}, draft {draft}; {held_out} of {texts} texts held out; gamma {settings['gamma']}, "
    said += (
        f"{settings['sinks']} sinks, window {settings['window']}; {heads({**content['profile'], 'layer_groups': ()})}."
    )
    if groups := content["profile"].get("layer_groups"):
        said += f" Rows that name layer groups: {heads({'layer_groups': groups})}."
    optuna = {"optuna": metadata.get("versions", {}).get("optuna")}
    said = f"{said} {measured([source], [{**content['conditions'], **optuna}])}"
    tables = (rates, *_comparisons(content, target, budgets))
    return Section(f"Attention recovery: {target} with {draft}", said, tables, (drawing,))


def _by_groups(content: Mapping[str, Any], budgets: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Rows of a profile with layer groups, of which the table's other rows say nothing."""
    found, count = content.get("layer_groups"), len(content["profile"].get("layer_groups") or ())
    if not found or not count:
        return ()
    return tuple(
        (f"{name}, {count} layer groups", *(cell for k in budgets for cell in (number(found[k][name], 4), MISSING)))
        for name in ("hybrid", "oracle")
    )


def _comparisons(content: Mapping[str, Any], target: str, budgets: Sequence[str]) -> Iterator[Table]:
    """What `compare` has added to a study: prices, and how stable the heads are."""
    if "prices" in content:
        found = {f"{name} heads": row for name, row in content["prices"]["heads"].items()}
        found |= {f"{name} layer groups": row for name, row in content["prices"]["groups"].items() if name != "1"}
        header = (f"{name}, k = {k}" for k in budgets for name in ("hybrid", "oracle"))
        yield Table(
            f"prices-{slug(target)}",
            f"Attention recovery rate by numbers of target + draft heads, and with sets for layer groups, {target}",
            ("Sets", *header),
            tuple(
                (n, *(number(row[k][x], 4) for k in budgets for x in ("hybrid", "oracle"))) for n, row in found.items()
            ),
            "The oracle is the best set of each layer group.",
        )
    if "stability" in content:
        found = content["stability"]
        yield Table(
            f"stability-{slug(target)}",
            f"Overlap of the retrieval heads with those that other needle samples rank best, {target}",
            ("Samples", *(f"{model}, {layers}" for model in found for layers in found[model])),
            tuple(
                (samples, *(number(row[samples], 3) for model in found.values() for row in model.values()))
                for samples in found["target"]["all"]
            ),
            "Of the heads of all layers, and of those that the profile uses.",
        )
