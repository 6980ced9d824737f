"""profile_pair: from two models and texts to a DustinProfile and a report, in a folder that can be interrupted."""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.utils import logging

import dustin_hf
from dustin_hf.eval.efficiency.record import conditions, without_folders
from dustin_hf.forward import input_device
from dustin_hf.held import differing, write_file
from dustin_hf.model_patches.families import ModelFamily
from dustin_hf.profile import DustinProfile, LayerGroup, config_hash
from dustin_hf.profiling.needles import fits
from dustin_hf.profiling.prices import prices, reached_by_groups, search_groups
from dustin_hf.profiling.progress import ProgressBars, Timed
from dustin_hf.profiling.recovery import Objective, policy_tables
from dustin_hf.profiling.search import SearchResult, SearchSettings, search
from dustin_hf.profiling.stability import Needles, stability
from dustin_hf.profiling.traces import (
    Candidate,
    Progress,
    TraceSettings,
    as_candidates,
    check_lengths,
    fingerprint,
    record,
    size_estimate,
)
from dustin_hf.texts import read_texts, rows_of_the_hub
from dustin_hf.validation import check_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.get_logger(__name__)

DATASET = "zai-org/LongReward-10k"
REPORT_NAME, STUDY_NAME, TIMES_NAME = "report.json", "study.json", "times.json"
DEFINITION = (
    "arr: share of the attention of all heads, over the full cache, that verification sees, the window's own tokens "
    "included (paper equations 1 and 2; mean over heads, layers, windows, then texts). arr_committed: the share of the "
    "attention on committed tokens that is kept, the window's own tokens left out of both sides."
)


@dataclass(frozen=True, slots=True)
class StudySettings:
    """What is identified, recorded and searched.

    Args:
        budgets: k; each gets an m of its own.
        gamma: drafted tokens per step, and tokens of a window.
        heads_per_layer: query heads of a candidate layer, the best retrievers of it (4 give the paper's 4 target heads
            in one layer and 12 draft heads in three).
        target_layers, draft_layers, min_gain, trials, seed, sinks, window: see `SearchSettings`.
        new_tokens, stride, deltas, batch_size: see `TraceSettings`.
        needle_lengths: tokens of the samples that heads are identified on; those beyond a model's limit are left out.
        max_context: longer texts lose their middle, so that a question at the end stays. Default: they are an error.
        chat: give each text as a user's message, by the tokenizer's chat template.
        layer_groups: groups of target layers that get sets of their own (`LayerGroup`): equal parts of the depth, each
            with a search for it. One set for all is the paper's.
        compare: report too what fewer heads cost and sets for layer groups would gain (`prices`, nine more searches),
            and how far the heads depend on the needles (`stability`).
    """

    budgets: tuple[int, ...] = (128, 256, 512)
    gamma: int = 4
    heads_per_layer: int = 4
    target_layers: int = 1
    draft_layers: int = 3
    min_gain: float = 0.0
    trials: int = 40
    seed: int = 0
    sinks: int = 4
    window: int = 16
    new_tokens: int = 128
    stride: int | None = None
    deltas: tuple[int, ...] = (1,)
    needle_lengths: tuple[int, ...] = (1024, 4096, 8192)
    max_context: int | None = None
    chat: bool = False
    batch_size: int = 1
    compare: bool = False
    layer_groups: int = 1

    def __post_init__(self) -> None:
        if self.compare and self.heads_per_layer != 4:
            raise ValueError(f"`compare` needs `heads_per_layer` 4, got {self.heads_per_layer}")

    def needles(
        self, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", texts: Mapping[str, str], state: Path
    ) -> Needles:
        """What a model's heads are identified with: samples of all lengths that the model and the texts have room for.

        Raises:
            ValueError: if the texts are too short for any.
        """
        limit = ModelFamily.positions(model.config.get_text_config(decoder=True))
        lengths = [n for n in self.needle_lengths if n <= limit and fits(texts, tokenizer, n)]
        if not lengths:
            raise ValueError(
                f"`texts` ({len(texts)}) are too short together for samples of {min(self.needle_lengths)} tokens, "
                "which identify heads: give longer texts"
            )
        return Needles(model, tokenizer, texts, lengths, self.heads_per_layer, self.seed, state)

    def traces(self, target: tuple[Candidate, ...], draft: tuple[Candidate, ...]) -> TraceSettings:
        """What is recorded."""
        return TraceSettings(target, draft, self.gamma, self.new_tokens, self.stride, self.deltas, self.batch_size)

    def search(self, target: int, draft: int) -> SearchSettings:
        """What is searched: the first so many candidates of each model."""
        return SearchSettings(
            budgets=self.budgets,
            target_layers=self.target_layers,
            draft_layers=self.draft_layers,
            min_gain=self.min_gain,
            sinks=self.sinks,
            window=self.window,
            trials=self.trials,
            seed=self.seed,
            target=tuple(range(target)),
            draft=tuple(range(draft)),
        )


def validation_texts(source: str | Path | None = None, limit: int | None = None) -> dict[str, str]:
    """Texts by name: of a folder or JSONL file (`read_texts`), or of zai-org/LongReward-10k through `datasets`.

    Args:
        source: folder or file. Default: the data set, which has to be downloaded or in the cache.
        limit: most texts; of the data set 32 by default.
    """
    if source is not None:
        return dict(list(read_texts(source).items())[:limit])
    limit = 32 if limit is None else limit
    return {f"{DATASET}:{i}": _text_of(row) for i, row in enumerate(rows_of_the_hub(DATASET, f"sft[:{limit}]"))}


def _text_of(row: Mapping[str, Any]) -> str:
    """Context and question of a row."""
    if "messages" in row:
        return row["messages"][0]["content"]
    parts = [row[name] for name in ("context", "text", "prompt", "query", "question") if row.get(name)]
    if not parts:
        raise ValueError(f"a row of the data set has no text, its fields are {sorted(row)}")
    return "\n\n".join(parts)


def profile_pair(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Mapping[str, str] | Sequence[str] | str | Path | None,
    out: str | Path,
    budgets: Sequence[int] = (128, 256, 512),
    gamma: int = 4,
    command: str = "",
    progress: Progress | None = None,
    say: Callable[[str], object] = logger.info,
    **options: Any,
) -> DustinProfile:
    """Find the profile of a pair: identify retrieval heads, record traces, search, report on held-out texts.

    Every fourth text, from the second on, is held out of the search. `out` keeps the results of all phases: called
    again with the same arguments, after an interruption at any point, it goes on there and ends in the same profile.
    It gets `dustin_profile.json` with its card, `report.json`, and in `times.json` the seconds of each phase of the
    last call.

    Args:
        target: the target.
        draft: of the same tokenizer.
        tokenizer: of both.
        texts: at least two texts, by name or not; or a source of `validation_texts`. Heads are identified in them too.
        out: folder of the study, made if absent.
        budgets: k; each gets an m of its own.
        gamma: drafted tokens per step.
        command: for the record.
        progress: called with the phase, and how much of it is done. Default: progress bars.
        say: is told how much room the traces take, before they are recorded.
        options: fields of `StudySettings`; `batch_size` is 8 by default on CUDA.

    Raises:
        ModuleNotFoundError: without optuna.
        UnsupportedModelError: if an architecture is not supported.
        ValueError: on models that do not fit together; on texts that cannot be read, are too long for a model, or too
            few; on a folder of another study.
        RuntimeError: if the disk is full.
    """
    if find_spec("optuna") is None:  # now, not after hours of recording
        raise ModuleNotFoundError("profiling needs optuna: pip install 'dustin_hf[search]'", name="optuna")
    check_pair(target, draft)
    options.setdefault("batch_size", 8 if input_device(target).type == "cuda" else 1)
    settings = StudySettings(budgets=tuple(budgets), gamma=gamma, **options)
    out = Path(out)
    progress = Timed(ProgressBars() if progress is None else progress, out / TIMES_NAME)
    if texts is None or isinstance(texts, str | Path):
        texts = validation_texts(texts)
    if not isinstance(texts, Mapping):
        texts = {f"number {i}": text for i, text in enumerate(texts)}
    if len(texts) < 2:
        raise ValueError(f"`texts` must be at least two, one of them is held out of the search, got {len(texts)}")
    prompts = {name: encode(tokenizer, text, settings) for name, text in texts.items()}
    lengths = {f"text {name!r}": len(ids) for name, ids in prompts.items()}
    check_lengths(target, draft, lengths, settings.new_tokens, max(settings.deltas) + 1)
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    depth, groups = configs[0].num_hidden_layers, settings.layer_groups
    if not 1 <= groups <= depth:
        raise ValueError(f"`layer_groups` must be between 1 and the {depth} layers of the target, got {groups}")
    default = DustinProfile.default(*configs)
    # what cannot be recorded or searched is said now, not after hours
    settings.traces(as_candidates(default.target_heads), as_candidates(default.draft_heads))
    settings.search(1, 1)
    most = max(len(ids) for i, ids in enumerate(prompts.values()) if i % 4 != 1) + settings.new_tokens - gamma
    if most <= max(budgets):
        raise ValueError(
            f"the longest text of the search and its continuation have {most} tokens before the last window, so a "
            f"budget of {max(budgets)} keeps all of them and there is nothing to choose: give longer texts or smaller "
            "`budgets`"
        )

    out.mkdir(parents=True, exist_ok=True)
    began = _begin(out, command, settings, prompts, target, draft)
    needles = {
        name: settings.needles(model, tokenizer, texts, out / f"{name}_heads.safetensors")
        for name, model in (("target", target), ("draft", draft))
    }
    target_heads, draft_heads = (
        needles[name].heads(needles[name].samples(), partial(progress, f"{name} heads")) for name in needles
    )
    # the default's heads are recorded as well, to be compared with, and the best few of each layer
    fewer = [{layer: best[:n] for layer, best in target_heads.items()} for n in ((1, 2) if settings.compare else ())]
    trace_settings = settings.traces(
        as_candidates(target_heads, default.target_heads, *fewer), as_candidates(draft_heads, default.draft_heads)
    )
    size = size_estimate(target, lengths.values(), trace_settings)
    say(f"the traces take up to {size / 1e9:.2f} GB in {out}")
    traces = record(target, draft, list(prompts.values()), out / "traces", trace_settings, progress)

    numbers = range(len(prompts))
    held_out, searched = [i for i in numbers if i % 4 == 1], [i for i in numbers if i % 4 != 1]
    search_settings = settings.search(len(as_candidates(target_heads)), len(as_candidates(draft_heads)))
    # before the search, which is long: texts held out need windows too
    device = input_device(target)
    objective = Objective(traces, held_out, settings.sinks, settings.window, device)
    result = search(traces, out, search_settings, searched, device, progress)
    stated = [
        getattr(trace_settings, name).index(as_candidates(heads)[0])
        for name, heads in (("target", default.target_heads), ("draft", default.draft_heads))
    ]
    tables = policy_tables(
        objective, result.target, result.draft, result.splits, (stated[0], stated[1], default.draft_share)
    )
    parts, by_groups = list[tuple[list[int], SearchResult]](), dict[str, dict[str, float]]()
    if groups > 1:
        # in the folder of the comparisons, which search some of the same groups
        places = traces, out / "prices", search_settings, searched
        parts = search_groups(*places, groups, device, progress)
        by_groups = reached_by_groups(traces, search_settings, held_out, parts, device)
    metadata = {
        **{
            name: {**about, "id": without_folders(about["id"])}  # a folder of this machine is nobody's business
            for name, about in (("target", fingerprint(target)), ("draft", fingerprint(draft)))
        },
        "arr": {
            k: row | {f"{name}_by_groups": round(x, 5) for name, x in by_groups.get(k, {}).items()}
            for k, row in _column(tables, "arr").items()
        },
        "arr_committed": _column(tables, "arr_committed"),
        "calibration": {
            "texts": len(prompts),
            "held_out": len(objective.numbers),
            "tokens": sum(lengths.values()),
            "longest": max(lengths.values()),
            "sources": list(prompts)[:64],
            **{name: asdict(settings)[name] for name in ("new_tokens", "needle_lengths", "sinks", "window", "seed")},
        },
        "versions": _versions(),
        "date": began["date"].partition("T")[0],
    }
    everywhere = _group(0, result, trace_settings)
    profile = DustinProfile(
        target_heads=everywhere.target_heads,
        draft_heads=everywhere.draft_heads,
        draft_share=everywhere.draft_share,
        num_assistant_tokens=gamma,
        target_hash=config_hash(configs[0]),
        draft_hash=config_hash(configs[1]),
        draft_shares=everywhere.draft_shares,
        metadata=json.loads(json.dumps(metadata)),
        layer_groups=tuple(_group(layers[0], found, trace_settings) for layers, found in parts),
    )
    report: dict[str, Any] = {
        "definition": DEFINITION,
        "conditions": began,
        "settings": asdict(settings),
        "searched": [list(prompts)[i] for i in searched],
        "held_out": [list(prompts)[i] for i in held_out],
        "arr": tables,
        "new_mass": _new_mass(objective),
        "searched_arr": result.arr,
        "rounds": result.rounds,
        "layer_groups": by_groups,
        "candidates": {name: getattr(trace_settings, name) for name in ("target", "draft")},
        "profile": profile.to_dict(),
    }
    if settings.compare:
        _keep(out, profile, report)  # there is more to wait for, but not for these
        report["prices"] = prices(traces, out / "prices", search_settings, searched, held_out, device, progress)
        _keep(out, profile, report)
        report["stability"] = {
            name: stability(needles[name], list(heads), partial(progress, f"stability of {name} heads"))
            for name, heads in (("target", profile.target_heads), ("draft", profile.draft_heads))
        }
    _keep(out, profile, report)
    progress.enter("end")
    return profile


def encode(tokenizer: "PreTrainedTokenizerBase", text: str, settings: StudySettings) -> list[int]:
    """Token ids of a prompt, at most `max_context` of them."""

    def ids_of(text: str) -> list[int]:
        if settings.chat:
            message = [{"role": "user", "content": text}]
            return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
        return list(tokenizer(text, verbose=False)["input_ids"])

    ids, limit = ids_of(text), settings.max_context
    return ids if limit is None else without_middle(ids, limit)


def without_middle(ids: list[int], limit: int) -> list[int]:
    """At most `limit` ids, from both ends: a question at the end stays, and what a template or a tokenizer adds."""
    return ids if len(ids) <= limit else ids[: limit - limit // 2] + ids[len(ids) - limit // 2 :]


def _begin(
    out: Path, command: str, settings: StudySettings, prompts: Mapping[str, list[int]], *models: "PreTrainedModel"
) -> dict[str, Any]:
    """The conditions under which this study began; refuses a folder of another one."""
    about = {
        "settings": json.loads(json.dumps(asdict(settings))),
        "texts": hashlib.sha256(json.dumps(list(prompts.items())).encode()).hexdigest()[:16],
        "models": [fingerprint(model) for model in models],
    }
    path = out / STUDY_NAME
    if path.is_file():
        try:
            held = dict(json.loads(path.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} cannot be read ({error}): use another folder, or remove it") from error
        if different := differing(held, about):
            raise ValueError(f"{out} is the folder of a study with other {different}: use another, or remove it")
    else:
        held = {**about, "conditions": conditions(command)}
        write_file(path, json.dumps(held, indent=1).encode())
    return held["conditions"]


def _group(first_layer: int, found: SearchResult, traces: TraceSettings) -> LayerGroup:
    """What a search has found, for the target layers from that one on."""
    shares = {k: m / k for k, m in found.splits.items()}
    return LayerGroup(
        first_layer,
        dict(traces.target[i] for i in found.target),
        dict(traces.draft[i] for i in found.draft),
        shares[max(shares)],
        shares,
    )


def _keep(out: Path, profile: DustinProfile, report: Mapping[str, Any]) -> None:
    write_file(out / REPORT_NAME, json.dumps(report, indent=1).encode())
    profile.save_pretrained(out)


def _column(tables: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, dict[str, float]]:
    return {k: {policy: round(row[name], 5) for policy, row in table.items()} for k, table in tables.items()}


def _new_mass(objective: Objective) -> list[float]:
    """Attention of each layer on a window's own tokens."""
    means = [objective.traces.sample(i).new_mass.double().mean(0) for i in objective.numbers]
    return torch.stack(means).mean(0).tolist()


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("torch", "transformers", "optuna")}
    return {"dustin_hf": dustin_hf.__version__, **found, "python": platform.python_version()}
