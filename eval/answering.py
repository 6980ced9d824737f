"""Answers questions under several methods, from one prefill for all; a run that was killed goes on where it was."""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dustin_hf
from dustin_hf._compat import CACHE_ARG
from dustin_hf.config import DustinConfig
from dustin_hf.eval.baselines import BASELINES, QuestPolicy, SnapKVPolicy, registered_baselines
from dustin_hf.eval.longbench.decoding import decode_answer
from dustin_hf.eval.run_folder import RunFolder
from dustin_hf.profile import DustinProfile
from dustin_hf.profiling.traces import fingerprint
from dustin_hf.selection import policy_names
from dustin_hf.testing import left_pad
from dustin_hf.validation import check_pair

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Baselines that need more than the smallest budget: made once for the error, before models are loaded.
DEMANDING: dict[str, Callable[[int], object]] = {"quest": partial(QuestPolicy, scale=1.0), "snapkv": SnapKVPolicy}


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
        known = dict.fromkeys((*policy_names(), *BASELINES))
        if self.mode not in known:
            raise ValueError(f"--method must be of {', '.join(known)}, got {self.mode!r}")
        if (self.budget is None) != (self.mode == "full"):
            raise ValueError(f"a budget goes with every method but 'full', got {self.budget} for {self.mode!r}")
        if self.budget is not None:
            DustinConfig(budget=self.budget)
            if self.mode in DEMANDING:
                DEMANDING[self.mode](self.budget)

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.mode if self.budget is None else f"{self.mode}-{self.budget}"

    def cache_config(self) -> dict[str, Any]:
        """For `generate`."""
        return {"mode": self.mode} | ({} if self.budget is None else {"budget": self.budget})


def methods_of(modes: Sequence[str], budgets: Sequence[int]) -> list[Method]:
    """Every mode with every budget, each once; `"full"` without one."""
    return list(dict.fromkeys(Method(m, budget) for m in modes for budget in (budgets if m != "full" else [None])))


@dataclass(frozen=True, slots=True)
class Settings:
    """What all methods of a run share.

    Args:
        gamma: drafted tokens per step.
        batch_size: questions of a group that are decoded together, of about the same length.
        draft_cache: of `cache_config`.

    Raises:
        ValueError: on values that `cache_config` refuses.
    """

    gamma: int = 3
    batch_size: int = 1
    draft_cache: str = "auto"

    def __post_init__(self) -> None:
        DustinConfig(draft_cache=self.draft_cache)


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt.

    Args:
        id: its own within its group.
        prompt: token ids.
        about: what else is kept beside the answer; ready for JSON.
    """

    id: str
    prompt: list[int]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """Questions that are decoded alike, and whose answers are one file.

    Args:
        questions: with different ids.
        arguments: of `generate`, besides prompts and Dustin's own.
        ends: tokens that end an answer.
    """

    questions: list[Question]
    arguments: dict[str, Any]
    ends: Collection[int]

    def __post_init__(self) -> None:
        twice = [name for name, count in Counter(question.id for question in self.questions).items() if count > 1]
        if twice:
            raise ValueError(f"`questions` must have different ids, got several of {twice[:5]}")


def answer(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    groups: Mapping[str, Group],
    methods: Sequence[Method],
    out: str | Path,
    settings: Settings,
    profile: DustinProfile | None = None,
    about: Mapping[str, Any] | None = None,
    command: str = "",
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[Method, RunFolder]:
    """Answer every group under every method.

    `out` gets a folder for each method: `config.json`, and `<group>.jsonl` with an answer on each line. A run that was
    killed goes on with the first batch that lacks an answer; batches are the same each time, so the files come out the
    same. A folder of another configuration is refused.

    Args:
        target: its answers they are.
        draft: drafts for every method, `"full"` included, which is lossless.
        tokenizer: of both.
        groups: by name, which is that of the file.
        methods: each with its budget.
        out: folder of the run, made if absent.
        settings: shared by all methods.
        profile: of the pair. Default: the one that is shipped, if any, else an untuned one.
        about: what else makes a run another one; ready for JSON.
        command: for the record.
        progress: called as `progress(group, done, total)`, in batches.

    Returns:
        The folders, complete.

    Raises:
        ValueError: on methods that are not different, models that do not fit together, a folder of another run, or a
            file in it that cannot be read.
    """
    if not methods or len({method.name for method in methods}) < len(methods):
        raise ValueError(f"`methods` must be different, and at least one, got {[method.name for method in methods]}")
    check_pair(target, draft)
    configs = [model.config.get_text_config(decoder=True) for model in (target, draft)]
    profile = profile or DustinProfile.of_pair(*configs)
    profile.check_pair(*configs)
    everything = {
        "target": fingerprint(target),
        "draft": fingerprint(draft),
        "dtype": str(target.dtype),
        "settings": asdict(settings),
        # a model's own, where nothing says otherwise: a repetition penalty stays in force
        "generation": _own_generation(target),
        "profile": profile.to_dict(),
        "questions": {name: _digest(group) for name, group in groups.items()},
        **(about or {}),
    }
    folders = {
        method: RunFolder(Path(out) / method.name, {**everything, "method": asdict(method)}) for method in methods
    }
    for folder in folders.values():
        folder.begin(command)
    with dustin_hf.enable(target, profile=profile), registered_baselines():
        for name, group in groups.items():
            batches = _batches(group.questions, settings.batch_size)
            for number, batch in enumerate(batches):
                if progress is not None:
                    progress(name, number, len(batches))
                ids = [question.id for question in batch]
                lacking = [method for method in methods if not folders[method].has(name, ids)]
                if not lacking:
                    continue
                for method, lines in zip(lacking, _answer(target, draft, tokenizer, group, batch, lacking, settings)):
                    folders[method].add(name, [{"id": q.id, **q.about, **line} for q, line in zip(batch, lines)])
            if progress is not None:
                progress(name, len(batches), len(batches))
    return folders


def _own_generation(model: "PreTrainedModel") -> dict[str, Any]:
    """What a model's generation config says, whichever version of transformers reads it."""
    found = {} if model.generation_config is None else model.generation_config.to_diff_dict()
    return {name: value for name, value in found.items() if name != "transformers_version"}


def _answer(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    group: Group,
    batch: Sequence[Question],
    methods: Sequence[Method],
    settings: Settings,
) -> Iterator[list[dict[str, Any]]]:
    """The answers to one batch under each method in turn; all go on from the prefill of the first."""
    inputs = {name: x.to(target.device) for name, x in left_pad([question.prompt for question in batch]).items()}
    width, cache = inputs["input_ids"].shape[1], None
    for method in methods:
        generate: Any = target.generate
        out = generate(
            **inputs,
            **group.arguments,
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
        yield [
            {
                "prediction": decode_answer(row, tokenizer, group.ends),
                "prompt_tokens": len(question.prompt),
                "new_tokens": len(row),
                "steps": len(committed),
            }
            for row, question, committed in zip(rows, batch, out.stats.committed)
        ]


def _batches(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Prompts of about the same length together, the longest last."""
    order = sorted(range(len(questions)), key=lambda i: (len(questions[i].prompt), i))
    return [[questions[i] for i in order[begin : begin + size]] for begin in range(0, len(order), size)]


def _digest(group: Group) -> str:
    content = [[question.id, question.prompt] for question in group.questions]
    return hashlib.sha256(json.dumps([content, group.arguments]).encode()).hexdigest()[:16]
