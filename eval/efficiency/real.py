"""`bench decode` on real weights and real text: real prefill, real greedy acceptance, through the public `generate`."""

import functools
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

import dustin_hf
from dustin_hf.eval.baselines import registered_baselines
from dustin_hf.eval.efficiency.arms import ARMS, Arm
from dustin_hf.eval.efficiency.decode import step_bytes
from dustin_hf.eval.efficiency.real_arms import Run, fill, plain, speculate, stock
from dustin_hf.eval.efficiency.record import conditions
from dustin_hf.eval.efficiency.shapes import SHAPES, Shape
from dustin_hf.eval.efficiency.texts import NGRAM, cut_prompts, old_shares, row_lengths
from dustin_hf.eval.efficiency.timing import copy_rate
from dustin_hf.eval.parts import Parts
from dustin_hf.pool import Pool
from dustin_hf.profile import DustinProfile
from dustin_hf.profiling.traces import fingerprint

REAL_ARMS = ("hf", *ARMS)
BASES = ("vanilla", "classic", "magicdec", "hf")
HF_TOKENS = 16
# A row is fresh if less than this share of its 8-grams was copied, and less repeated.
FRESH = 0.2
NOTES = (
    "One prefill for each point; all arms but hf decode from its caches, twice, and the second run counts: kernels are "
    "compiled and steps captured by then. decode_s: wall time of that run without prefill; the host's time and a first "
    "step that runs op by op are in it. tokens_per_s: committed tokens over decode_s.",
    "steady: from the second step to the last in which all rows were active, by the host's clock. phases_s: by events.",
    "copied, repeated: shares of the new 8-grams that the row's prompt, or its own output before, holds; fresh rows "
    f"have less than {FRESH} of both. tau: tokens committed per step, the target's own included. No token ends a text.",
    f"hf: stock `generate`, dynamic cache, own prefill, {HF_TOKENS} tokens at most: all its figures are by the "
    "median of the later half of its steps. prefill_s: a single run.",
    "floor_ms: bytes of a step at the length of the prompts, 4 target and 12 draft heads scored, over the copy rate of "
    "this run; floor_share: over steady_step_ms.",
)


def shape_of(config: Any) -> Shape:
    """The dimensions of a model, under the name that `SHAPES` has for them, else the model's.

    Raises:
        ValueError: if no `Shape` can describe them.
    """
    config = config.get_text_config(decoder=True)
    fields: tuple[Any, ...] = (
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        config.vocab_size,
        bool(config.tie_word_embeddings),
        "qwen2" if config.model_type == "qwen2" else "llama",  # which is about biases only
    )
    known = [name for name, shape in SHAPES.items() if shape == Shape(name, *fields)]
    return Shape(known[0] if known else _name(config), *fields)


def run_real(
    target: Any,
    draft: Any,
    texts: Mapping[str, Sequence[int]],
    contexts: Sequence[int],
    batches: Sequence[int],
    gamma: int,
    budget: int,
    arms: Sequence[str],
    new_tokens: int,
    command: str,
    profile: DustinProfile | None = None,
    progress: Callable[[str], object] | None = None,
    ragged: bool = False,
    parts: Parts | None = None,
    front: Sequence[int] = (),
) -> dict[str, Any]:
    """Decode real text. Runs on the CPU too, for tests: op by op, and without floors.

    Args:
        target: the model that verifies.
        draft: the one that drafts, on the same device.
        texts: token ids by file name, as from `read_texts`.
        contexts: tokens of each prompt.
        batches: rows.
        gamma: drafts per step.
        budget: slots that sparse verification reads, and a draft cache that is not full.
        arms: names of `REAL_ARMS`.
        new_tokens: of each row.
        command: as typed, for the record.
        profile: of the pair; None for the one that is shipped, if any, else the default.
        progress: is told what comes next.
        ragged: prompts from half the context to all of it, instead of equal ones.
        parts: hold the points that are done.
        front: token ids that each prompt starts with, counted in its context: a BOS.

    Returns:
        Ready for JSON: `rows`, one for each arm and point, `prompts` (where they were cut), and `conditions`.

    Raises:
        ValueError: on an unknown arm, too few new tokens or too little text, before anything is measured.
    """
    if unknown := sorted(set(arms) - set(REAL_ARMS)):
        raise ValueError(f"--arms must be of {', '.join(REAL_ARMS)} for real models, got {', '.join(unknown)}")
    if new_tokens < NGRAM:
        raise ValueError(f"--new-tokens must be at least {NGRAM}, got {new_tokens}")
    sizes = [(batch, context) for batch in batches for context in contexts]
    points = [(*size, cut_prompts(texts, row_lengths(size[1], size[0], ragged), front)) for size in sizes]
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    shipped = DustinProfile.shipped(configs[0], configs[1])
    used = profile or shipped or DustinProfile.default(configs[0], configs[1])
    parts = parts or Parts()
    parts.begin(
        fingerprint(target),
        fingerprint(draft),
        [[p.tokens for p in prompts] for _, _, prompts in points],
        used.to_dict(),
    )
    rate = parts.of("copy rate", copy_rate) if target.device.type == "cuda" else None
    rows: list[dict[str, Any]] = []
    own = target.generation_config
    target.generation_config = GenerationConfig(pad_token_id=0)  # nothing ends a text, and no processor looks at it
    try:
        for batch, context, prompts in points:
            say = functools.partial(_say, progress, f"{batch} x {context:,}")
            tokens = [prompt.tokens for prompt in prompts]
            measure = functools.partial(_measure, target, draft, tokens, gamma, budget, arms, new_tokens, used, say)
            measured = parts.of(f"{batch} x {context}", measure)
            for name in dict.fromkeys(arms):
                arm = ARMS.get(name, ARMS["vanilla"])
                row = {"arm": name, "context": context, "batch": batch, "ragged": ragged}
                row |= {"gamma": gamma if arm.draft_cache else 0, "budget": budget if _reads_budget(arm) else None}
                row |= measured[name]
                row |= _floor(target, draft, arm, [len(t) for t in tokens], row, rate)
                rows.append(row)
    finally:
        target.generation_config = own
    return {
        "rows": with_ratios(rows),
        "bench": "decode",
        "target": _name(target.config),
        "draft": _name(draft.config),
        "acceptance": f"real: greedy, {new_tokens} new tokens per row",
        "profile": "given" if profile else "shipped" if shipped else "default",
        "notes": list(NOTES),
        "prompts": [
            {"context": context, "batch": batch, "source": p.source, "start": p.start, "length": len(p.tokens)}
            for batch, context, prompts in points
            for p in prompts
        ],
        "copy_rate_gb_s": rate,
        "conditions": conditions(command),
    }


def _say(progress: Callable[[str], object] | None, where: str, what: str) -> None:
    if progress is not None:
        progress(f"{where}: {what}")


def _name(config: Any) -> str:
    return Path(config.name_or_path).name or config.model_type


def _reads_budget(arm: Arm) -> bool:
    return arm.sparse or arm.draft_cache in ("streaming", "sparse")


@torch.no_grad()
def _measure(
    target: Any,
    draft: Any,
    prompts: list[list[int]],
    gamma: int,
    budget: int,
    arms: Sequence[str],
    new_tokens: int,
    profile: DustinProfile,
    say: Callable[[str], object],
) -> dict[str, dict[str, Any]]:
    """What each arm does with these prompts; `error` where the memory is too short for stock."""
    measured = {}
    own_arms = [name for name in dict.fromkeys(arms) if name in ARMS]
    if own_arms:
        say("prefill")
        pool = Pool()
        with dustin_hf.enable(target, profile=profile), registered_baselines():
            point = fill(target, draft, prompts, new_tokens, gamma)
            for name in own_arms:
                say(name)
                for _ in range(2):
                    if ARMS[name].draft_cache is None:
                        run = plain(target, draft, point, profile, new_tokens, pool)
                    else:
                        run = speculate(target, draft, point, ARMS[name], gamma, budget, new_tokens)
                measured[name] = figures(run, prompts)
        pool.close()
        point.cache._shared.graphs.clear()
        del point
        _release()
    if "hf" in arms:
        say("hf")
        try:
            measured["hf"] = figures(stock(target, prompts, min(HF_TOKENS, new_tokens)), prompts)
        except RuntimeError as error:  # out of memory, or a kernel that refuses the size
            measured["hf"] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        _release()
    return measured


def _release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def figures(run: Run, prompts: list[list[int]]) -> dict[str, Any]:
    """Speeds, tau, and how much of the output was there before."""
    committed, shares = run.committed, [old_shares(prompt, new) for prompt, new in zip(prompts, run.rows)]
    steps, together = max(map(len, committed)), min(map(len, committed))
    fresh = [row for row, old in zip(committed, shares) if max(old) < FRESH]
    found: dict[str, Any] = {
        "prefill_s": run.prefill_s,
        "decode_s": run.seconds,
        "steps": steps,
        "new_tokens": [sum(row) for row in committed],
        "step_ms": run.seconds / steps * 1e3,
        "tokens_per_s": sum(map(sum, committed)) / run.seconds,
        "steady_step_ms": None,
        "steady_tokens_per_s": None,
        "tau": _tau(committed),
        "tau_per_row": [_tau([row]) for row in committed],
        "tau_fresh": _tau(fresh),
        "fresh_rows": len(fresh),
        "copied": statistics.mean(copied for copied, _ in shares),
        "repeated": statistics.mean(repeated for _, repeated in shares),
        "copied_per_row": [copied for copied, _ in shares],
        "repeated_per_row": [repeated for _, repeated in shares],
        "phases_s": run.phases,
    }
    if together > 1:
        seconds = run.stamps[together - 1] - run.stamps[0]
        found["steady_step_ms"] = seconds / (together - 1) * 1e3
        found["steady_tokens_per_s"] = sum(sum(row[1:together]) for row in committed) / seconds
    return found | run.more


def _tau(committed: list[list[int]]) -> float | None:
    steps = sum(map(len, committed))
    return sum(map(sum, committed)) / steps if steps else None


def _floor(
    target: Any, draft: Any, arm: Arm, lengths: list[int], row: dict[str, Any], rate: float | None
) -> dict[str, float | None]:
    """The floor of a step, and its share of what was measured; None where either is unknown."""
    floor = share = None
    try:
        if rate is not None:
            needed = step_bytes(
                shape_of(target.config), shape_of(draft.config), arm, lengths, row["gamma"], row["budget"] or 0
            )
            floor = needed / rate / 1e6
    except ValueError:
        pass  # no `Shape` describes such a model
    if floor is not None and row.get("steady_step_ms"):
        share = floor / row["steady_step_ms"]
    return {"floor_ms": floor, "floor_share": share}


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Beside each row, its speeds over those of the baselines at the same point, where both were measured."""
    for row in rows:
        for base in BASES:
            for other in rows:
                if other["arm"] == base and (other["context"], other["batch"]) == (row["context"], row["batch"]):
                    for key, name in (("tokens_per_s", f"over_{base}"), ("steady_tokens_per_s", f"steady_over_{base}")):
                        if row.get(key) and other.get(key):
                            row[name] = row[key] / other[key]
    return rows
