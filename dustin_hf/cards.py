"""Model cards of profiles: what is in one, how well it does, how it was made."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dustin_hf.profile import DustinProfile, Heads, LayerGroup

PLOTS_NAME = "plots"
# Only cards with this line are written anew: a folder may hold a README of its own.
GENERATED = "<!-- made by dustin_hf; remove this line to keep changes -->"
_ONE_SET = " What does not end in `by_groups` is of one set for all layers, by the heads of the first table."


def model_card(profile: "DustinProfile", name: str = "path/or/hub-id", plots: Sequence[str] = ()) -> str:
    """The card of a profile, Markdown with a YAML header.

    Args:
        profile: its fields and what its `metadata` tells are shown.
        name: what `enable(model, profile=...)` takes.
        plots: files in `plots/` beside it.
    """
    data = profile.metadata
    target, draft = (str(data.get(model, {}).get("id", f"your {model}")) for model in ("target", "draft"))
    known = [model for model in (target, draft) if model.count("/") == 1 and not model.startswith((".", "/"))]
    lines = ["---", "library_name: transformers", "tags:", "- dustin", "- speculative-decoding", "- sparse-attention"]
    lines += ["base_model:", *(f"- {model}" for model in known)] if known else []
    lines += ["---", GENERATED, "", f"# Dustin profile of {target} with {draft}", ""]
    lines += [
        "Which attention heads of this target and draft choose the cached tokens that verification reads, and how the "
        "budget is split between both. There are no weights in here.",
        "",
        "| | layers: heads |",
        "|---|---|",
        f"| target, last committed token | {_heads_in_words(profile.target_heads)} |",
        f"| draft, lookahead | {_heads_in_words(profile.draft_heads)} |",
        "",
    ]
    if profile.layer_groups:
        lines += [
            "Groups of target layers have sets of their own:",
            "",
            "| from layer | target | draft | m / k |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {group.first_layer} | {_heads_in_words(group.target_heads)} | {_heads_in_words(group.draft_heads)} | "
            f"{_shares_in_words(group)} |"
            for group in profile.layer_groups
        ]
        lines.append("")
    else:
        lines += [f"Of the budget k the draft chooses m: {_shares_in_words(profile)}, as a share.", ""]
    arr = data.get("arr", {})
    if arr:
        policies = list(dict.fromkeys(policy for table in arr.values() for policy in table))
        lines += [
            "## Attention recovery rate",
            "",
            "Share of the attention over the full cache that verification sees, the tokens of the block included; mean "
            "over heads, layers, windows and held-out texts. `oracle` knows the attention to come, with one set for "
            "all layers, or with one per layer." + (_ONE_SET if profile.layer_groups else ""),
            "",
            f"| budget | {' | '.join(policies)} |",
            "|---" * (len(policies) + 1) + "|",
        ]
        for k, table in arr.items():
            cells = (f"{table[policy]:.4f}" if policy in table else "" for policy in policies)
            lines.append(f"| {k} | {' | '.join(cells)} |")
        lines.append("")
    lines += [line for plot in plots for line in (f"![{Path(plot).stem}]({PLOTS_NAME}/{plot})", "")]
    lines += [
        "## Use",
        "",
        "```python",
        "import dustin_hf",
        "",
        f'dustin_hf.enable(target, profile="{name}")',
        'target.generate(**inputs, assistant_model=draft, cache_implementation="dustin", cache_config={"budget": 512})',
        "```",
        "",
        "## Limits",
        "",
        "- For this pair, and fine-tunes of the same shapes; other models are refused.",
        "- Verification with a budget below the length is approximate: the output is not the target's own. Recovery "
        "rates are a proxy, measured on full-cache runs: judge by your task.",
        "- The calibration texts below are what it was tuned on; other lengths and languages were not looked at.",
    ]
    lines += ["", "## Made with", "", "```json", json.dumps(_how_made(profile), indent=1), "```", ""]
    return "\n".join(lines)


def _shares_in_words(part: "DustinProfile | LayerGroup") -> str:
    by_budget = (f"{share:.3f} (k = {k})" for k, share in sorted(part.draft_shares.items()))
    return ", ".join(by_budget) or f"{part.draft_share:.3f}"


def _heads_in_words(heads: "Heads") -> str:
    return "; ".join(f"{layer}: {', '.join(map(str, chosen))}" for layer, chosen in heads.items())


def _how_made(profile: "DustinProfile") -> dict[str, Any]:
    rest = {name: value for name, value in profile.metadata.items() if not name.startswith("arr")}
    return {"schema_version": profile.schema_version, "gamma": profile.num_assistant_tokens, **rest}
