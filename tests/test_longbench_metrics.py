"""LongBench's scores: equal to the official ones case by case, and odd input; also through `evaluate`."""

import gzip
import json
import re
import sys
from itertools import groupby
from pathlib import Path

import pytest

from dustin_hf.eval.longbench import CHINESE, ENGLISH, GROUPS, TASKS, averages, metrics, score_sample, score_task

DATA = Path(__file__).parent / "data" / "longbench"
# Scored by the official code; `expected_score_levenshtein` with the other backend of its code similarity.
CASES = [json.loads(line) for line in gzip.decompress((DATA / "metric_cases.jsonl.gz").read_bytes()).splitlines()]
AGGREGATES = json.loads((DATA / "metric_aggregate.json").read_text())
METRIC = Path(metrics.__file__).parent / "evaluate_metric"
FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")

# For each metric an answer, one line that is right, and one that is wrong.
LINES = {
    "qa_f1": ("a red boat", "Red boat.", "green"),
    "qa_f1_zh": ("红色的船", "红色的船。", "绿色"),
    "rouge": ("the red boat sails", "the red boat sails", "it is green"),
    "rouge_zh": ("红色的船开了", "红色的船开了", "绿色"),
    "classification": ("City", "City", "Date"),
    "retrieval": ("Paragraph 7", "Paragraph 7", "Paragraph 8"),
    "retrieval_zh": ("段落7", "段落7", "段落8"),
    "count": ("7", "7", "8"),
    "code_similarity": ("x = 1", "# x is one", "x = 1"),
}


def score(case):
    return score_sample(case["dataset"], case["prediction"], case["answers"], case["all_classes"])


def alike(cases):
    """What one call of the scorer takes: cases that have the labels of the first."""
    return [case for case in cases if case["all_classes"] == cases[0]["all_classes"]]


def test_cases_are_all_there():
    assert len(CASES) == 285 and {case["dataset"] for case in CASES} == set(TASKS) == set(AGGREGATES)


@pytest.mark.parametrize("task", TASKS)
def test_official_scores(task):
    cases = [case for case in CASES if case["dataset"] == task]
    for case in cases:
        assert score(case) == pytest.approx(case["expected_score"], abs=1e-6), case["note"]
    cases = alike(cases)
    columns = [[case[name] for case in cases] for name in ("prediction", "answers")]
    assert len(cases) == AGGREGATES[task]["cases"]
    assert score_task(task, *columns, cases[0]["all_classes"]) == AGGREGATES[task]["score"]


def subsequence(a, b):
    """Length of the longest common one."""
    row = [0] * (len(b) + 1)
    for x in a:
        above, row = row, [0]
        for j, y in enumerate(b):
            row.append(above[j] + 1 if x == y else max(above[j + 1], row[j]))
    return row[-1]


def test_code_similarity_is_that_of_difflib():
    """The other backend is the longest common subsequence: higher in four cases, in none lower."""
    cases = [case for case in CASES if case["dataset"] in ("lcc", "repobench-p")]
    different = 0
    for case in cases:
        lines = [line for line in case["prediction"].lstrip("\n").split("\n") if not re.search("[`#]|//", line)]
        line, answer = (lines or [""])[0], case["answers"][0]
        ratio = 2 * subsequence(line, answer) / (len(line) + len(answer))
        assert round(100 * ratio) / 100 == case["expected_score_levenshtein"] >= score(case)
        different += case["expected_score_levenshtein"] != score(case)
    assert different == 4 and len(cases) == 38


@pytest.mark.parametrize("task", TASKS)
def test_first_line_only_where_official_p67(task):
    answer, right, wrong = LINES[TASKS[task].metric]
    classes = ["City", "Date"]
    both, alone = (score_sample(task, text, [answer], classes) for text in (f"\n\n{right}\n{wrong}", right))
    if task in FIRST_LINE:
        assert both == alone > 0.99
    else:
        assert both != pytest.approx(alone, abs=0.01)
    # blanks are no newlines: a first line of blanks is one
    if task in FIRST_LINE:
        assert score_sample(task, f" \n{right}", [answer], classes) == 0


@pytest.mark.parametrize("task", TASKS)
def test_best_reference_counts_p68(task):
    answer, right, wrong = LINES[TASKS[task].metric]
    right = answer if task in ("lcc", "repobench-p") else right
    other = wrong if wrong != answer else "print()"
    for answers in ([answer, other], [other, answer]):
        assert score_sample(task, right, answers, ["City", "Date"]) > 0.99
    assert score_sample(task, right, [other], ["City", "Date"]) < 0.7
    assert score_sample(task, right, [], ["City", "Date"]) == 0


def test_unrelated_summary_is_low_p68():
    summary = "The council approved a new tram line along the harbour. Work begins in May and costs nine million."
    other = "Researchers found that bees prefer blue flowers. Their study ran for two summers in three meadows."
    assert score_sample("gov_report", summary, [summary]) == pytest.approx(1, abs=1e-6)
    assert score_sample("gov_report", summary, [other]) < 0.2
    assert score_sample("vcsum", "会议批准了新的电车线路，五月开工。", ["研究发现蜜蜂喜欢蓝色的花。"]) < 0.3


def test_summaries_that_rouge_refuses():
    for text in ("", ".", "..."):
        assert score_sample("samsum", text, ["fine"]) == score_sample("samsum", "fine", [text]) == 0
    # without a full stop one sentence, too long for the recursion of the package
    endless = "word " * 1200
    assert score_sample("gov_report", endless, [endless]) == 0


def test_chinese_marks_that_the_official_list_lacks():
    """It has the closing mark of a book's title and not the opening one, which counts as a word."""
    assert score_sample("multifieldqa_zh", "渡船》。", ["渡船"]) == 1
    assert score_sample("multifieldqa_zh", "《渡船》。", ["渡船"]) == pytest.approx(2 / 3)


def test_shared_dictionary_of_jieba_changes_nothing():
    import jieba

    before = score_sample("multifieldqa_zh", "红色的船", ["红色的轮船"])
    jieba.add_word("红色的船")
    try:
        assert score_sample("multifieldqa_zh", "红色的船", ["红色的轮船"]) == before
    finally:
        jieba.del_word("红色的船")


def test_averages():
    scores = {"narrativeqa": 10.0, "qasper": 20.0, "lcc": 60.0}
    found = averages(scores)
    assert found.groups == {"single-doc QA": 15.0, "code": 60.0}
    assert (found.over_groups, found.over_tasks) == (37.5, 30.0)
    everything = averages({name: 50.0 for name in TASKS})
    assert tuple(everything.groups) == GROUPS and everything.over_groups == everything.over_tasks == 50
    assert (len(ENGLISH), len(CHINESE)) == (16, 5) and {*ENGLISH, *CHINESE} == set(TASKS)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: score_sample("qaspr", "x", ["x"]), "no task 'qaspr'; expected one of narrativeqa, qasper"),
        (lambda: score_sample("qasper", "x", "x"), "`answers` must be a list of references, got the text 'x'"),
        (lambda: score_sample("trec", "x", ["x"]), "trec needs its labels as `all_classes`, got None"),
        (lambda: score_sample("passage_retrieval_en", "x", ["7"]), r"must name a paragraph .*, got '7'"),
        (lambda: score_task("qasper", [], []), "one for each sample, got 0 and 0"),
        (lambda: score_task("qasper", ["x", "y"], [["x"]]), "one for each sample, got 2 and 1"),
        (lambda: averages({}), "at least one task"),
        (lambda: averages({"qaspr": 1.0}), "no task 'qaspr'"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("library, task", [("rouge", "samsum"), ("jieba", "vcsum")])
def test_missing_library_is_named(library, task, monkeypatch):
    cached = (metrics._rouge_scorer, metrics._segmenter)
    for function in cached:
        function.cache_clear()
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"need {library}: pip install 'dustin_hf\[eval\]'"):
        score_sample(task, "x", ["x"])


def test_evaluate_module(tmp_path):
    evaluate = pytest.importorskip("evaluate")
    metric = evaluate.load(str(METRIC), cache_dir=str(tmp_path))
    cases = sorted(CASES, key=lambda case: case["dataset"])
    for task, group in groupby(cases, key=lambda case: case["dataset"]):
        group = alike(list(group))
        references = [{"answers": case["answers"], "all_classes": case["all_classes"]} for case in group]
        predictions = [case["prediction"] for case in group]
        found = metric.compute(predictions=predictions, references=references, dataset=task)
        assert found == {"score": AGGREGATES[task]["score"]}
    with pytest.raises(ValueError, match="same `all_classes` in one task, got 2 different"):
        references = [{"answers": ["x"], "all_classes": [name]} for name in "xy"]
        metric.compute(predictions=["x", "x"], references=references, dataset="trec")
