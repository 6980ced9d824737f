"""What LongBench consists of: 21 tasks, and what each prescribes.

Source: THUDM/LongBench, `pred.py` and `eval.py`. The tables of templates and lengths beside this file,
`dataset2prompt.json` and `dataset2maxlen.json`, are LongBench's own and unchanged ("asconcisely" is in the original):
MIT License, Copyright (c) 2023 THU-KEG & Zhipu AI.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Metric = Literal[
    "qa_f1", "qa_f1_zh", "rouge", "rouge_zh", "classification", "retrieval", "retrieval_zh", "count", "code_similarity"
]
Language = Literal["en", "zh"]

GROUPS = ("single-doc QA", "multi-doc QA", "summarization", "few-shot", "synthetic", "code")

_TABLE: dict[str, tuple[str, Language, Metric]] = {
    "narrativeqa": ("single-doc QA", "en", "qa_f1"),
    "qasper": ("single-doc QA", "en", "qa_f1"),
    "multifieldqa_en": ("single-doc QA", "en", "qa_f1"),
    "multifieldqa_zh": ("single-doc QA", "zh", "qa_f1_zh"),
    "hotpotqa": ("multi-doc QA", "en", "qa_f1"),
    "2wikimqa": ("multi-doc QA", "en", "qa_f1"),
    "musique": ("multi-doc QA", "en", "qa_f1"),
    "dureader": ("multi-doc QA", "zh", "rouge_zh"),
    "gov_report": ("summarization", "en", "rouge"),
    "qmsum": ("summarization", "en", "rouge"),
    "multi_news": ("summarization", "en", "rouge"),
    "vcsum": ("summarization", "zh", "rouge_zh"),
    "trec": ("few-shot", "en", "classification"),
    "triviaqa": ("few-shot", "en", "qa_f1"),
    "samsum": ("few-shot", "en", "rouge"),
    "lsht": ("few-shot", "zh", "classification"),
    "passage_count": ("synthetic", "en", "count"),
    "passage_retrieval_en": ("synthetic", "en", "retrieval"),
    "passage_retrieval_zh": ("synthetic", "zh", "retrieval_zh"),
    "lcc": ("code", "en", "code_similarity"),
    "repobench-p": ("code", "en", "code_similarity"),
}


@dataclass(frozen=True, slots=True)
class Task:
    """One task.

    Args:
        name: LongBench's own.
        group: one of `GROUPS`, the categories that averages are reported for.
        language: of prompt and answers; code counts as English.
        metric: see `dustin_hf.eval.longbench.metrics`.
        template: of the prompt, with the fields `{context}` and, in most, `{input}`.
        max_new_tokens: the longest answer.
        chat: whether chat models get their chat template. Few-shot examples and code are texts to go on with instead.
        first_line: whether only the first line of an answer counts, after leading newlines: few-shot answers tend to go
            on with further made-up examples.
        ends_at_newline: whether a newline ends an answer.
    """

    name: str
    group: str
    language: Language
    metric: Metric
    template: str
    max_new_tokens: int
    chat: bool
    first_line: bool
    ends_at_newline: bool


def task_of(name: str) -> Task:
    """The task of that name.

    Raises:
        ValueError: if there is none.
    """
    if name not in TASKS:
        raise ValueError(f"LongBench has no task {name!r}; expected one of {', '.join(TASKS)}")
    return TASKS[name]


def _table(file: str) -> dict[str, Any]:
    return json.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))


def _tasks() -> dict[str, Task]:
    templates, lengths = _table("dataset2prompt.json"), _table("dataset2maxlen.json")
    return {
        name: Task(
            name,
            group,
            language,
            metric,
            template=templates[name],
            max_new_tokens=lengths[name],
            chat=group not in ("few-shot", "code"),
            first_line=group == "few-shot",
            ends_at_newline=name == "samsum",
        )
        for name, (group, language, metric) in _TABLE.items()
    }


TASKS = _tasks()
ENGLISH = tuple(name for name, task in TASKS.items() if task.language == "en")
CHINESE = tuple(name for name, task in TASKS.items() if task.language == "zh")
