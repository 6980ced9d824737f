"""Scores of answers, equal to those of LongBench's official scorer (`metrics.py` and `eval.py` of THUDM/LongBench)."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, partial
from importlib import import_module
from typing import Any

from dustin_hf.eval.longbench.tasks import GROUPS, Metric, task_of

_PUNCTUATION = str.maketrans("", "", string.punctuation)
# What the official Chinese normalisation drops besides: "《" and "〈" are not in its list, and stay.
_PUNCTUATION_ZH = _PUNCTUATION | str.maketrans(
    "",
    "",
    "！＂＃＄％＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"  # full and half width
    "、。〃》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏",
)


@dataclass(frozen=True, slots=True)
class Averages:
    """Means of task scores, 0 to 100.

    Args:
        groups: of the tasks of each group that has any.
        over_groups: of those; LongBench's overall score ("macro-average over major task categories").
        over_tasks: of all tasks alike.
    """

    groups: dict[str, float]
    over_groups: float
    over_tasks: float


def score_sample(
    dataset: str, prediction: str, answers: Sequence[str], all_classes: Sequence[str] | None = None
) -> float:
    """Score of one answer, 0 to 1: the best over the references.

    ROUGE adds 1e-8 in a denominator, so that a perfect summary has a score just below 1.

    Args:
        dataset: name of the task.
        prediction: the answer as generated; of trec, triviaqa, samsum and lsht its first line counts.
        answers: references; without any the score is 0.
        all_classes: labels, needed for trec and lsht.

    Raises:
        ValueError: on an unknown task, a single text as `answers`, labels that are missing, or a reference that names
            no paragraph where one is wanted.
        ModuleNotFoundError: if rouge or jieba is needed and missing.
    """
    task = task_of(dataset)
    if isinstance(answers, str):
        raise ValueError(f"`answers` must be a list of references, got the text {answers!r:.80}: put it in a list")
    if task.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = _METRICS[task.metric]
    if task.metric == "classification":
        if not all_classes:
            raise ValueError(f"{dataset} needs its labels as `all_classes`, got {all_classes!r}: pass the sample's")
        metric = partial(metric, classes=all_classes)
    return max((metric(prediction, answer) for answer in answers), default=0.0)


def score_task(
    dataset: str,
    predictions: Sequence[str],
    answers: Sequence[Sequence[str]],
    all_classes: Sequence[str] | None = None,
) -> float:
    """Score of a task, 0 to 100, rounded to 2 places: the mean over its samples.

    Args:
        dataset: name of the task.
        predictions: an answer for each sample.
        answers: the references of each sample.
        all_classes: labels, the same for all samples of a task.

    Raises:
        ValueError: as `score_sample`, or if there is nothing to score, or not one of `answers` for each prediction.
    """
    if not predictions or len(predictions) != len(answers):
        raise ValueError(
            f"`predictions` and `answers` must be one for each sample, got {len(predictions)} and {len(answers)}"
        )
    total = 0.0
    for prediction, references in zip(predictions, answers):
        total += score_sample(dataset, prediction, references, all_classes)
    return round(100 * total / len(predictions), 2)


def averages(scores: Mapping[str, float]) -> Averages:
    """Averages of the scores of tasks, by name of the task.

    Raises:
        ValueError: if there is none, or a task is unknown.
    """
    if not scores:
        raise ValueError("`scores` must hold at least one task")
    members: dict[str, list[float]] = {group: [] for group in GROUPS}
    for name, score in scores.items():
        members[task_of(name).group].append(score)
    groups = {group: sum(found) / len(found) for group, found in members.items() if found}
    return Averages(groups, sum(groups.values()) / len(groups), sum(scores.values()) / len(scores))


def _qa_f1(prediction: str, answer: str) -> float:
    return _f1(_words(prediction), _words(answer))


def _qa_f1_zh(prediction: str, answer: str) -> float:
    return _f1(_words_zh(prediction), _words_zh(answer))


def _words(text: str) -> list[str]:
    """Words in lower case without punctuation and articles; punctuation goes first, and so joins words."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def _words_zh(text: str) -> list[str]:
    """Words as jieba cuts the text, in lower case without punctuation and spaces."""
    words = ("".join(word.lower().translate(_PUNCTUATION_ZH).split()) for word in _cut(text))
    return [word for word in words if word]


def _f1(predicted: list[str], wanted: list[str]) -> float:
    """F1 of two bags of words."""
    common = (Counter(predicted) & Counter(wanted)).total()
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def _rouge(prediction: str, answer: str) -> float:
    """F of ROUGE-L over sentences, split at full stops; 0 where the package raises, as in the official code.

    It raises on empty texts, and since it recurses over words, on sentences of about 1,000.
    """
    try:
        return _rouge_scorer().get_scores(prediction, answer)[0]["rouge-l"]["f"]
    except (ValueError, RecursionError):
        return 0.0


def _rouge_zh(prediction: str, answer: str) -> float:
    return _rouge(" ".join(_cut(prediction)), " ".join(_cut(answer)))


def _classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of labels that the prediction names, if the right one is among them.

    Labels that are part of the right one do not count as named. The official loop removes them from the list it walks
    over, and so passes over the label behind each one removed; scores depend on it.
    """
    named = [name for name in classes if name in prediction]
    for name in named:
        if name in answer and name != answer:
            named.remove(name)
    return 1 / len(named) if answer in named else 0.0


def _count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the right one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def _retrieval(prediction: str, answer: str, pattern: str) -> float:
    """As `_count`, with the number of the paragraph that the answer names."""
    number = re.search(pattern, answer)
    if number is None:
        raise ValueError(f"`answers` must name a paragraph ({pattern}), got {answer!r:.80}")
    return _count(prediction, number[1])


def _code_similarity(prediction: str, answer: str) -> float:
    """Similarity to the first line that holds no comment or Markdown, in whole hundredths.

    The official metric is `ratio` of fuzzywuzzy, which is that of difflib, here called itself, unless
    python-Levenshtein is installed: then it is twice the longest common subsequence over both lengths. difflib commits
    to the longest block in common before it looks left and right of it, and so finds at most as much.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * SequenceMatcher(None, line, answer).ratio()) / 100


_METRICS: dict[Metric, Callable[..., float]] = {
    "qa_f1": _qa_f1,
    "qa_f1_zh": _qa_f1_zh,
    "rouge": _rouge,
    "rouge_zh": _rouge_zh,
    "classification": _classification,
    "retrieval": partial(_retrieval, pattern=r"Paragraph (\d+)"),
    "retrieval_zh": partial(_retrieval, pattern=r"段落(\d+)"),
    "count": _count,
    "code_similarity": _code_similarity,
}

_LIBRARIES: dict[Metric, tuple[str, ...]] = {
    "qa_f1_zh": ("jieba",),
    "rouge": ("rouge",),
    "rouge_zh": ("rouge", "jieba"),
}


def check_libraries(datasets: Iterable[str]) -> None:
    """Raise `ModuleNotFoundError` before any answer, if scores of these tasks need a library that is missing."""
    for dataset in datasets:
        for name in _LIBRARIES.get(task_of(dataset).metric, ()):
            _library(name)


def _cut(text: str) -> list[str]:
    """Chinese words."""
    return _segmenter().lcut(text)


@cache
def _segmenter() -> Any:
    """A segmenter with the dictionary of jieba alone, whatever words the program has added to the shared one."""
    jieba = _library("jieba")
    jieba.setLogLevel("WARNING")  # it tells of each stage of loading on stderr
    return jieba.Tokenizer()


@cache
def _rouge_scorer() -> Any:
    return _library("rouge").Rouge(metrics=["rouge-l"])


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"LongBench scores need {name}: pip install 'dustin_hf[eval]'", name=name) from error
