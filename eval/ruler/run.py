"""RULER-style tasks from samples to scores, under several methods."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_hf.eval.answering import Group, Method, Question, Settings, answer
from dustin_hf.eval.ruler.metrics import score_task
from dustin_hf.eval.ruler.samples import Sample
from dustin_hf.held import write_file
from dustin_hf.profile import DustinProfile
from dustin_hf.validation import check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SCORES_NAME = "scores.json"


def run_ruler(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    samples: Sequence[Sample],
    methods: Sequence[Method],
    out: str | Path,
    settings: Settings | None = None,
    profile: DustinProfile | None = None,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Answer samples greedily under every method, resumable (see `answer`), and score the answers.

    Args:
        target: its answers are scored.
        draft: drafts for every method.
        tokenizer: of both.
        samples: as from `ruler_samples`.
        methods: each with its budget.
        out: folder of the run, made if absent.
        settings: shared by all methods.
        profile: of the pair. Default: the one that is shipped, if any, else an untuned one.
        command: for the record.
        progress: called as `progress("task-length", done, total)`, in batches.

    Returns:
        By name of the method what its folder's `scores.json` holds: task -> length -> score, 0 to 100.

    Raises:
        ValueError: on samples longer than a model's limit, a folder of another run, or a file that cannot be read.
    """
    if not samples:
        raise ValueError("`samples` must hold at least one, got none")
    check_positions(target.config, max(sample.length for sample in samples))
    cells: dict[str, list[Sample]] = {}
    for sample in samples:
        cells.setdefault(f"{sample.task}-{sample.length}", []).append(sample)
    ends: Any = target.generation_config.eos_token_id if target.generation_config else None
    groups = {
        name: Group(
            [Question(str(s.number), list(s.prompt_ids), {"answers": list(s.answers)}) for s in chosen],
            {"do_sample": False, "num_beams": 1, "max_new_tokens": chosen[0].max_new_tokens},
            ends if isinstance(ends, list) else [] if ends is None else [ends],
        )
        for name, chosen in cells.items()
    }
    about = {"benchmark": "ruler"}
    folders = answer(
        target, draft, tokenizer, groups, methods, out, settings or Settings(), profile, about, command, progress
    )
    found: dict[str, dict[str, dict[str, float]]] = {}
    for method, folder in folders.items():
        scores: dict[str, dict[str, float]] = {}
        for name, chosen in cells.items():
            lines = [folder.lines[name][str(sample.number)] for sample in chosen]
            score = score_task([line["prediction"] for line in lines], [sample.answers for sample in chosen])
            scores.setdefault(chosen[0].task, {})[str(chosen[0].length)] = score
        write_file(folder.path / SCORES_NAME, (json.dumps(scores, indent=1) + "\n").encode())
        found[method.name] = scores
    return found
