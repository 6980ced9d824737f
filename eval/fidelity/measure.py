"""fidelity: replays contexts under policies at several budgets, and sums up agreement, KL and attention recovery."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from dustin_hf.eval.efficiency.texts import NGRAM, old_shares
from dustin_hf.eval.fidelity.policies import Arm, build_arms
from dustin_hf.eval.fidelity.replay import Replayed, Trajectory, replay
from dustin_hf.eval.parts import Parts
from dustin_hf.profile import DustinProfile
from dustin_hf.profiling.traces import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SINKS, WINDOW = 4, 16  # as `DustinConfig`
MODES = ("hybrid", "target", "draft", "streaming", "oracle")
FIGURES = ("agreement", "kl", "arr", "arr_committed")
DEFINITION = (
    "Real sparse runs over the full cache's greedy continuation, whose tokens are given. kl: KL(full || sparse) in "
    "nats after each token; agreement: share of tokens after which both have the same best token. arr: share of the "
    "attention of all heads, over the full cache, that verification sees, the window's own tokens included (mean over "
    "heads, queries, layers); arr_committed: the share of the attention on committed tokens that is kept. Means over "
    "tokens or windows, then over contexts. pearson: of kl with arr or arr_committed, over the means of runs (one "
    "context, mode and budget each), over windows, and as in appendix B of the paper within one context at one budget, "
    "over policies, of which the mean over contexts is given; full is left out."
)


def fidelity(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    contexts: Mapping[str, str | Sequence[int]] | Sequence[str | Sequence[int]],
    profile: DustinProfile | None = None,
    budgets: Sequence[int] = (128, 256, 512),
    modes: Sequence[str] = MODES,
    new_tokens: int = 128,
    *,
    gamma: int = 4,
    sinks: int = SINKS,
    window: int = WINDOW,
    batch_size: int = 1,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    parts: Parts | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """How close sparse verification stays to the full cache in real runs, on the same contexts for every policy.

    Args:
        target: its verification is sparse.
        draft: it looks ahead, over its own full cache.
        contexts: texts or token ids, by name or not; texts need the `tokenizer`.
        profile: of the pair. Default: the one that is shipped, if any, else an untuned one.
        budgets: k.
        modes: policies: `"hybrid"`, `"target"`, `"draft"`, registered ones, `"streaming"`, `"oracle"` (one set for all
            layers), `"oracle-layers"`, and `"full"`, which must come out exact.
        new_tokens: most tokens of a continuation.
        gamma: tokens of a window.
        sinks: protected tokens at the start, counted in k.
        window: protected tokens at the end, counted in k.
        batch_size: contexts that are run at once.
        tokenizer: of the target.
        parts: hold the batches that are done.
        progress: called as `progress("fidelity", done, total)`, in windows of batches.

    Returns:
        Ready for JSON: `definition`, `settings`, `contexts` (length, new tokens, and the shares of their 8-grams that
        are copied from the context or repeated), `results` (of each mode and budget: means, and the same of each
        context with its windows), `pearson`. A figure is None where no token counts: the model ended the text at once.

    Raises:
        ValueError: on contexts, modes or budgets that cannot be served.
        UnsupportedModelError: if a model's architecture is not supported.
    """
    rows = _token_ids(contexts, tokenizer)
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be positive, got {batch_size}")
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    profile = profile or DustinProfile.of_pair(*configs)
    profile.check_pair(*configs)
    parts = parts or Parts()
    parts.begin(fingerprint(target), fingerprint(draft), rows, profile.to_dict())
    arms = build_arms(target, draft, profile, modes, budgets, sinks, window)
    names = list(rows)
    batches = [names[i : i + batch_size] for i in range(0, len(names), batch_size)]
    about: list[dict[str, Any]] = []
    found: list[list[dict[str, Any]]] = [[] for _ in arms]
    for number, batch in enumerate(batches):

        def step(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress("fidelity", number * total + done, len(batches) * total)

        def replayed(batch: list[str] = batch, step: Callable[[int, int], None] = step) -> list[list[dict[str, Any]]]:
            ids = [rows[name] for name in batch]
            policies = [arm.policy for arm in arms]
            trajectory, runs = replay(target, draft, ids, policies, new_tokens=new_tokens, gamma=gamma, progress=step)
            return [
                [_about(name, ids[i], trajectory, i), *(_figures(run, trajectory, i, gamma) for run in runs)]
                for i, name in enumerate(batch)
            ]

        for context, *figures in parts.of(f"batch {number}", replayed):
            about.append(context)
            for row, of_arm in zip(found, figures):
                row.append(of_arm)
    results = [_result(arm, row) for arm, row in zip(arms, found)]
    return {
        "definition": DEFINITION,
        "settings": {
            "target": target.config._name_or_path,
            "draft": draft.config._name_or_path,
            "dtype": str(target.dtype),
            "new_tokens": new_tokens,
            "gamma": gamma,
            "sinks": sinks,
            "window": window,
            "profile": profile.to_dict(),
        },
        "contexts": about,
        "results": results,
        "pearson": correlations(results),
    }


def pearson(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's correlation; None where there are fewer than three points, or one side does not vary."""
    if len(x) < 3:
        return None
    a, b = (torch.tensor(values, dtype=torch.double) for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    norm = float(a.norm() * b.norm())
    return float(a @ b) / norm if norm > 1e-12 else None


def _token_ids(
    contexts: Mapping[str, str | Sequence[int]] | Sequence[str | Sequence[int]],
    tokenizer: "PreTrainedTokenizerBase | None",
) -> dict[str, list[int]]:
    """Token ids by name."""
    if not isinstance(contexts, Mapping):
        contexts = {f"context {i}": each for i, each in enumerate(contexts)}
    if not contexts:
        raise ValueError("`contexts` is empty: there is nothing to replay")
    rows = {}
    for name, each in contexts.items():
        if isinstance(each, str):
            if tokenizer is None:
                raise ValueError(f"`contexts` hold text ({name}): pass the `tokenizer` too, or token ids")
            ids: Any = tokenizer(each, verbose=False)["input_ids"]
            each = ids
        rows[name] = [int(token) for token in each]
    return rows


def _about(name: str, ids: Sequence[int], trajectory: Trajectory, row: int) -> dict[str, Any]:
    """Length, new tokens, and how much of them is old."""
    new = trajectory.tokens[row, trajectory.counted[row]].tolist()
    copied, repeated = old_shares(ids, new) if len(new) >= NGRAM else (None, None)
    return {"name": name, "tokens": len(ids), "new_tokens": len(new), "copied": copied, "repeated": repeated}


def _figures(run: Replayed, trajectory: Trajectory, row: int, gamma: int) -> dict[str, Any]:
    """Means of one row of a run, and its windows."""
    counted = trajectory.counted[row]
    windows: dict[str, list[float]] = {name: [] for name in FIGURES}
    for i, begin in enumerate(range(0, int(counted.sum()), gamma)):
        # tokens that count are the first ones of a row
        part = slice(begin, min(begin + gamma, int(counted.sum())))
        windows["agreement"].append(float(run.same[row, part].double().mean()))
        windows["kl"].append(float(run.kl[row, part].double().mean()))
        windows["arr"].append(float(run.arr[row, i]))
        windows["arr_committed"].append(float(run.arr_committed[row, i]))
    means = {
        "agreement": _mean(run.same[row][counted].tolist()) if len(counted) else None,
        "kl": _mean(run.kl[row][counted].tolist()) if len(counted) else None,
        "arr": _mean(windows["arr"]),
        "arr_committed": _mean(windows["arr_committed"]),
    }
    return {**means, "windows": {name: [round(x, 8) for x in values] for name, values in windows.items()}}


def _result(arm: Arm, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name: _mean([row[name] for row in rows if row[name] is not None]) for name in FIGURES}
    return {"mode": arm.mode, "budget": arm.budget, **means, "contexts": list(rows)}


def correlations(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Pearson's correlation of KL with both ARRs, from the `results` of `fidelity`.

    Returns:
        `runs`, `windows` and, where a budget has three policies, `contexts K` (within each context at that budget, then
        the mean over contexts): `arr` and `arr_committed`.
    """
    sparse = [result for result in results if result["budget"] is not None]
    budgets = dict.fromkeys(result["budget"] for result in sparse)
    runs = [row for result in sparse for row in result["contexts"] if row["kl"] is not None]
    found: dict[str, Any] = {"runs": {}, "windows": {}}
    for name in ("arr", "arr_committed"):
        found["runs"][name] = pearson([row[name] for row in runs], [row["kl"] for row in runs])
        found["windows"][name] = pearson(*([x for row in runs for x in row["windows"][side]] for side in (name, "kl")))
        for budget in budgets:
            # the rows of one context
            groups = zip(*(result["contexts"] for result in sparse if result["budget"] == budget))
            each = [
                pearson([row[name] for row in group], [row["kl"] for row in group])
                for group in groups
                if group[0]["kl"] is not None
            ]
            mean = _mean([x for x in each if x is not None])
            if mean is not None:
                found.setdefault(f"contexts {budget}", {})[name] = mean
    return found


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None
