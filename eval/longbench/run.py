"""Runs LongBench under several methods, from one prefill for all; a run that was killed goes on where it was."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dustin_hf
from dustin_hf._compat import CACHE_ARG
from dustin_hf.config import DustinConfig
from dustin_hf.eval.baselines import register_baselines
from dustin_hf.eval.longbench.data import Sample
from dustin_hf.eval.longbench.decoding import decode_answer, end_ids, generate_arguments
from dustin_hf.eval.longbench.metrics import averages, score_sample
from dustin_hf.eval.longbench.prompts import encode_prompt
from dustin_hf.eval.longbench.tasks import task_of
from dustin_hf.eval.run_folder import RunFolder
from dustin_hf.profile import DustinProfile
from dustin_hf.profiling.traces import fingerprint, write_file
from dustin_hf.selection import policy_names
from dustin_hf.testing import left_pad

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCORES_NAME = "scores.json"
# What a prompt leaves of the model's positions: the longest answer (512 tokens) and a chat template.
RESERVED = 768


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode.

    Args:
        mode: of `cache_config`, baselines included.
        budget: slots that it reads; None for `"full"`, which reads all.
    """

    mode: str
    budget: int | None = None

    def __post_init__(self) -> None:
        register_baselines()
        if self.mode not in policy_names():
            raise ValueError(f"--method must be of {', '.join(policy_names())}, got {self.mode!r}")
        if (self.budget is None) != (self.mode == "full"):
            raise ValueError(f"a budget goes with every method but 'full', got {self.budget} for {self.mode!r}")
        if self.budget is not None:
            DustinConfig(budget=self.budget)

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.mode if self.budget is None else f"{self.mode}-{self.budget}"

    def cache_config(self) -> dict[str, Any]:
        """For `generate`."""
        return {"mode": self.mode} | ({} if self.budget is None else {"budget": self.budget})


@dataclass(frozen=True, slots=True)
class Settings:
    """What all methods of a run share.

    Args:
        gamma: drafted tokens per step.
        batch_size: samples of a task that are decoded together, of about the same length.
        max_length: tokens of a prompt beyond which its middle is cut. Default: what the smaller model has room for.
        draft_cache: of `cache_config`.
    """

    gamma: int = 3
    batch_size: int = 1
    max_length: int | None = None
    draft_cache: str = "auto"


def run_longbench(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    samples: Mapping[str, Sequence[Sample]],
    methods: Sequence[Method],
    out: str | Path,
    settings: Settings | None = None,
    profile: DustinProfile | None = None,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Answer samples under every method, and score the answers.

    `out` gets a folder for each method: `config.json`, `<task>.jsonl` with an answer on each line, and `scores.json`. A
    run that was killed goes on with the first batch that lacks an answer; batches are the same each time, so the files
    come out the same. A folder of another configuration is refused. Decoding is greedy.

    Args:
        target: its answers are scored.
        draft: drafts for every method, `"full"` included, which is lossless.
        tokenizer: of both.
        samples: by task, as from `load_samples`.
        methods: each with its budget.
        out: folder of the run, made if absent.
        settings: shared by all methods.
        profile: of the pair. Default: the one that is shipped, if any, else an untuned one.
        command: for the record.
        progress: called as `progress(task, done, total)`, in batches.

    Returns:
        By name of the method what `scores.json` holds: `tasks` (score 0 to 100 and tau of each), `groups`,
        `over_groups` and `over_tasks`.

    Raises:
        ValueError: on prompts that do not fit, a folder of another run, or a file in it that cannot be read.
    """
    settings = settings or Settings()
    if not methods or len({method.name for method in methods}) < len(methods):
        raise ValueError(f"`methods` must be different, and at least one, got {[method.name for method in methods]}")
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    positions = min(config.max_position_embeddings for config in configs)
    limit = positions - RESERVED if settings.max_length is None else settings.max_length
    profile = profile or DustinProfile.shipped(*configs) or DustinProfile.default(*configs)
    profile.check_pair(*configs)
    prompts = {
        task: [encode_prompt(sample, tokenizer, limit, positions) for sample in chosen]
        for task, chosen in samples.items()
    }
    about = {
        "target": fingerprint(target),
        "draft": fingerprint(draft),
        "dtype": str(target.dtype),
        "settings": {**asdict(settings), "max_length": limit},
        # a model's own, where the method does not say otherwise: a repetition penalty stays in force, as officially
        "generation": target.generation_config.to_diff_dict() if target.generation_config else {},
        "profile": profile.to_dict(),
        "samples": {task: _digest(prompts[task]) for task in samples},
    }
    folders = {method: RunFolder(Path(out) / method.name, {**about, "method": asdict(method)}) for method in methods}
    for folder in folders.values():
        folder.begin(command)
    with dustin_hf.enable(target, profile=profile):
        for task, chosen in samples.items():
            batches = _batches([len(ids) for ids in prompts[task]], settings.batch_size)
            for number, batch in enumerate(batches):
                if progress is not None:
                    progress(task, number, len(batches))
                ids = {chosen[i].id: prompts[task][i] for i in batch}
                lacking = [method for method in methods if not folders[method].has(task, ids)]
                if not lacking:
                    continue
                answers = _answer(target, draft, tokenizer, task, list(ids.values()), lacking, settings)
                for method, lines in zip(lacking, answers):
                    folders[method].add(task, [{**_about(chosen[i]), **line} for i, line in zip(batch, lines)])
            if progress is not None:
                progress(task, len(batches), len(batches))
    return {method.name: _scores(folder, samples) for method, folder in folders.items()}


def _answer(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    task: str,
    prompts: list[list[int]],
    methods: Sequence[Method],
    settings: Settings,
) -> list[list[dict[str, Any]]]:
    """The answers to one batch under each method; all go on from the prefill of the first."""
    inputs = {name: x.to(target.device) for name, x in left_pad(prompts).items()}
    arguments = generate_arguments(task_of(task), tokenizer, target.generation_config)  # type: ignore[arg-type]
    ends = end_ids(task_of(task), tokenizer, target.generation_config)  # type: ignore[arg-type]
    width, cache = inputs["input_ids"].shape[1], None
    found = []
    for method in methods:
        generate: Any = target.generate
        out = generate(
            **inputs,
            **arguments,
            assistant_model=draft,
            cache_implementation="dustin",
            cache_config={**method.cache_config(), "draft_cache": settings.draft_cache},
            num_assistant_tokens=settings.gamma,
            pad_token_id=0 if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            return_dict_in_generate=True,
            **({} if cache is None else {CACHE_ARG: cache}),
        )
        cache = out[CACHE_ARG]
        rows = [row[width : width + new].tolist() for row, new in zip(out.sequences, out.stats.new_tokens)]
        found.append(
            [
                {
                    "prediction": decode_answer(row, tokenizer, ends),
                    "prompt_tokens": len(ids),
                    "new_tokens": len(row),
                    "steps": len(committed),
                }
                for row, ids, committed in zip(rows, prompts, out.stats.committed)
            ]
        )
    return found


def _about(sample: Sample) -> dict[str, Any]:
    classes = sample.all_classes
    return {
        "id": sample.id,
        "answers": list(sample.answers),
        "all_classes": None if classes is None else list(classes),
        "length": sample.length,
    }


def _batches(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Samples of about the same length together, the longest last."""
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    return [order[i : i + size] for i in range(0, len(order), size)]


def _digest(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def _scores(folder: RunFolder, samples: Mapping[str, Sequence[Sample]]) -> dict[str, Any]:
    """Scores of all tasks, also written to `scores.json`."""
    tasks, means = {}, {}
    for task, chosen in samples.items():
        lines = [folder.lines[task][sample.id] for sample in chosen]
        scores = [
            score_sample(task, line["prediction"], sample.answers, sample.all_classes)
            for line, sample in zip(lines, chosen)
        ]
        steps, new = sum(line["steps"] for line in lines), sum(line["new_tokens"] for line in lines)
        means[task] = round(100 * sum(scores) / len(scores), 2)
        tasks[task] = {"score": means[task], "samples": len(scores), "tau": new / steps if steps else None}
    result = {"tasks": tasks, **asdict(averages(means))}
    write_file(folder.path / SCORES_NAME, (json.dumps(result, indent=1) + "\n").encode())
    return result
