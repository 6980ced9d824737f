"""What captions say of a run: its models, machine, versions, commit, command and date, as they were recorded."""

from collections.abc import Mapping, Sequence
from typing import Any

from dustin_hf.eval.efficiency.record import without_folders
from dustin_hf.eval.report.sources import Source

VERSIONS = ("torch", "triton", "transformers", "optuna", "python", "dustin_hf")


def model_name(recorded: str) -> str:
    """The Hub id, or the last part of an absolute path: no folder of a machine belongs into a report."""
    return without_folders(recorded)


def versions(found: Mapping[str, Any]) -> str:
    """Those that were recorded."""
    return ", ".join(f"{name} {found[name]}" for name in VERSIONS if found.get(name))


def machine(conditions: Mapping[str, Any]) -> str:
    """GPU, driver, versions and commit: what two runs must share to stand in one table."""
    gpu = f"{conditions.get('gpu_count') or 1} x {conditions['gpu']}" if conditions.get("gpu") else "no GPU"
    known = [(title, conditions.get(title.lower())) for title in ("driver", "CUDA")]
    about = ", ".join(f"{title} {value}" for title, value in known if value)
    commit = f"commit {conditions['commit'][:12]}" if conditions.get("commit") else "commit not recorded"
    changed = ", tracked files changed" if conditions.get("dirty") else ""
    parts = (f"{gpu} ({about})" if about else gpu, versions(conditions), commit + changed)
    return "; ".join(filter(None, parts))


def measured(sources: Sequence[Source], conditions: Sequence[Mapping[str, Any] | None]) -> str:
    """Where the numbers come from: machines, dates, commands and files, each said once.

    Args:
        sources: the runs.
        conditions: of each, as `record.conditions` made them; None where a run has none.
    """
    kept = [each for each in conditions if each]
    parts = [f"Measured on {'; and on '.join(dict.fromkeys(map(machine, kept)))}." if kept else ""]
    if len(kept) < len(conditions):
        parts.append("GPU, commit and command were not recorded.")
    dates = sorted({each["date"][:10] for each in kept if each.get("date")})
    commands = dict.fromkeys(f"`{each['command']}`" for each in kept if each.get("command"))
    parts.append(f"Date: {', '.join(dates)}." if dates else "")
    parts.append(f"Command: {'; '.join(commands)}." if commands else "")
    weights = dict.fromkeys(filter(None, map(_weights, sources)))
    parts.append(f"Weights: {'; '.join(weights)}." if weights else "")
    parts.append(f"From {', '.join(f'`{source.name}`' for source in sources)}.")
    return " ".join(filter(None, parts))


def _weights(source: Source) -> str | None:
    """What was noted of the weights, which may not be those of the models' names."""
    content = source.content.get("config", source.content)
    noted: str | None = content.get("weights") or (content.get("conditions") or {}).get("weights")
    return noted


def notes(sources: Sequence[Source]) -> str:
    """The notes that the runs carry, each once, as they were written."""
    found: dict[str, None] = {}
    for source in sources:
        given = source.content["notes"]
        found |= dict.fromkeys([given] if isinstance(given, str) else given)
    return " ".join(found)


def heads(profile: Mapping[str, Any]) -> str:
    """Which heads of a pair were scored, in numbers; of a profile with layer groups, in each of them."""

    def count(name: str, group: Mapping[str, Any]) -> str:
        layers = group[f"{name}_heads"]
        return f"{sum(map(len, layers.values()))} {name} heads of {len(layers)} layer{'s' * (len(layers) > 1)}"

    def said(group: Mapping[str, Any]) -> str:
        shares = {int(k): share for k, share in (group.get("draft_shares") or {}).items()}
        by_budget = " or ".join(f"{share:.3f} (k = {k})" for k, share in sorted(shares.items()))
        share = by_budget or f"{group['draft_share']:.3f}"
        return f"{count('target', group)}, {count('draft', group)}, draft share {share}"

    groups = profile.get("layer_groups") or ()
    if not groups:
        return said(profile)
    return f"{len(groups)} layer groups: " + "; ".join(f"from layer {g['first_layer']} on {said(g)}" for g in groups)
