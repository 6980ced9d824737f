"""LongBench's scores as a metric of the `evaluate` library, loaded from this folder."""

from typing import Any

import datasets
import evaluate

from dustin_hf.eval.longbench.metrics import score_task

_CITATION = """\
@inproceedings{bai2024longbench,
  title = {LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding},
  author = {Bai, Yushi and others},
  booktitle = {Proceedings of the 62nd Annual Meeting of the Association for Computational Linguistics},
  year = {2024}
}
"""
_INPUTS = """
Args:
    predictions: an answer for each sample, as generated.
    references: for each sample `answers`, the references, and `all_classes`, the labels of trec and lsht, else empty.
    dataset: name of the task.
Returns:
    score: 0 to 100, rounded to 2 places, as of the official scorer.
Example:
    >>> metric = evaluate.load("eval/longbench/evaluate_metric")
    >>> references = [{"answers": ["Paris", "the city of Paris"], "all_classes": []}]
    >>> metric.compute(predictions=["Paris."], references=references, dataset="hotpotqa")
    {'score': 100.0}
"""


class LongBench(evaluate.Metric):
    """The score of one task."""

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description="Score of a task of LongBench, equal to that of its official scorer.",
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": text, "references": {"answers": [text], "all_classes": [text]}}),
            reference_urls=["https://github.com/THUDM/LongBench"],
        )

    def _compute(self, predictions: list[str], references: list[dict[str, Any]], dataset: str) -> dict[str, float]:
        classes = {tuple(reference["all_classes"] or ()) for reference in references}
        if len(classes) > 1:
            raise ValueError(f"`references` must have the same `all_classes` in one task, got {len(classes)} different")
        answers = [reference["answers"] for reference in references]
        return {"score": score_task(dataset, predictions, answers, *classes)}
