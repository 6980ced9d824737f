"""LongBench from samples to scores, under several methods."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from dustin_hf.eval.answering import Group, Method, Question, Settings, answer
from dustin_hf.eval.longbench.data import Sample
from dustin_hf.eval.longbench.decoding import end_ids, generate_arguments
from dustin_hf.eval.longbench.metrics import averages, check_libraries, score_sample
from dustin_hf.eval.longbench.prompts import encode_prompt
from dustin_hf.eval.longbench.tasks import task_of
from dustin_hf.eval.run_folder import RunFolder
from dustin_hf.held import write_file
from dustin_hf.model_patches.families import ModelFamily
from dustin_hf.profile import DustinProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.get_logger(__name__)
SCORES_NAME = "scores.json"
# What a prompt leaves of the model's positions: the longest answer (512 tokens) and a chat template.
RESERVED = 768


def run_longbench(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    samples: Mapping[str, Sequence[Sample]],
    methods: Sequence[Method],
    out: str | Path,
    settings: Settings | None = None,
    max_length: int | None = None,
    profile: DustinProfile | None = None,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, Any]]:
    """Answer samples greedily under every method, resumable (see `answer`), and score the answers.

    Args:
        target: its answers are scored.
        draft: drafts for every method.
        tokenizer: of both.
        samples: by task, as from `load_samples`.
        methods: each with its budget.
        out: folder of the run, made if absent.
        settings: shared by all methods.
        max_length: tokens of a prompt beyond which its middle is cut. Default: what the smaller model has room for.
        profile: of the pair. Default: the one that is shipped, if any, else an untuned one.
        command: for the record.
        progress: called as `progress(task, done, total)`, in batches.

    Returns:
        By name of the method what its folder's `scores.json` holds: `tasks` (score 0 to 100 and tau of each, and the
        scores of its samples), `groups`, `over_groups` and `over_tasks`.

    Raises:
        ValueError: on prompts that do not fit, a folder of another run, or a file in it that cannot be read.
        ModuleNotFoundError: if rouge or jieba is needed and missing.
    """
    check_libraries(samples)
    chat = bool(tokenizer.chat_template)
    if not chat and (bare := [task for task in samples if task_of(task).chat]):
        logger.warning(
            f"The tokenizer has no chat template: prompts of {', '.join(bare)} are given as they are, as to a base "
            "model. Chat models score far lower so: see that the template was kept beside the weights."
        )
    positions, of_draft = (ModelFamily.positions(m.config.get_text_config(decoder=True)) for m in (target, draft))
    limit = min(positions, of_draft) - RESERVED if max_length is None else max_length
    if max_length is None and limit < 2:
        raise ValueError(f"both models must have more than {RESERVED + 1} positions, got {positions} and {of_draft}")
    own: Any = target.generation_config
    groups = {
        task: Group(
            [
                Question(sample.id, encode_prompt(sample, tokenizer, limit, positions), _about(sample))
                for sample in chosen
            ],
            generate_arguments(task_of(task), tokenizer, own),
            end_ids(task_of(task), tokenizer, own),
        )
        for task, chosen in samples.items()
    }
    about = {"benchmark": "longbench", "max_length": limit, "chat_template": chat}
    folders = answer(
        target, draft, tokenizer, groups, methods, out, settings or Settings(), profile, about, command, progress
    )
    return {method.name: _scores(folder, samples) for method, folder in folders.items()}


def _about(sample: Sample) -> dict[str, Any]:
    classes = sample.all_classes
    return {
        "answers": list(sample.answers),
        "all_classes": None if classes is None else list(classes),
        "length": sample.length,
    }


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
        tasks[task]["each"] = [round(100 * score, 4) for score in scores]
    result = {"tasks": tasks, **asdict(averages(means))}
    write_file(folder.path / SCORES_NAME, (json.dumps(result, indent=1) + "\n").encode())
    return result
