"""Reports of LongBench runs: cells by hand, marks, what is refused, and a folder that keeps what is not its own."""

import csv
import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dustin_hf import cli
from dustin_hf.eval.report import folder as folder_module
from dustin_hf.eval.report import write as write_module
from dustin_hf.eval.report.accuracy import accuracy_sections
from dustin_hf.eval.report.layout import Table, best_and_second, number, slug, tokens
from dustin_hf.eval.report.sources import read_sources
from dustin_hf.eval.report.write import write_report

CONDITIONS = {
    "date": "2030-05-06T07:08:09+00:00",
    "command": "dustin-hf x --out y",
    "gpu": "GPU 9",
    "gpu_count": 2,
    "driver": "1.2",
    "cuda": "13.0",
    "torch": "2.11.0",
    "triton": None,
    "transformers": "5.17.0",
    "python": "3.11.1",
    "dustin_hf": "0.1.0",
    "commit": "0123456789abcdef",
    "dirty": True,
}
PROFILE = {"target_heads": {"3": [0, 1]}, "draft_heads": {"1": [0], "2": [1, 2]}, "draft_share": 0.75}
SAMPLES = {"narrativeqa": 200, "multifieldqa_en": 100, "multi_news": 100, "triviaqa": 100}
SCORES = {
    ("full", None): (30, 60, 20, 90),
    ("streaming", 512): (15, 30, 10, 60),
    ("quest", 512): (27, 60, 20, 90),
    ("hybrid", 512): (30, 57, 19, 90),
    ("oracle", 512): (31, 60, 21, 91),
    ("hybrid", 128): (24, 45, 18, 85),
}


def write_run(out, mode, budget, scores, **config):
    """The folder of a run of one method."""
    path = out / (mode if budget is None else f"{mode}-{budget}")
    path.mkdir(parents=True)
    about = {
        "target": {"id": "/data/models/Big-7B", "hash": "a"},
        "draft": {"id": "org/small", "hash": "b"},
        "dtype": "torch.bfloat16",
        "settings": {"gamma": 3, "batch_size": 4, "draft_cache": "auto"},
        "generation": {},
        "profile": PROFILE,
        "method": {"mode": mode, "budget": budget},
        "conditions": CONDITIONS,
    }
    (path / "config.json").write_text(json.dumps({**about, **config}))
    (path / "scores.json").write_text(json.dumps(scores))
    return path


def make_run(out, mode, budget, scores, **config):
    # samples of the lossless run are alike, all others 4 points above or below their mean
    spread = 0 if budget is None else 4
    tasks = {
        task: {"score": s, "samples": n, "tau": 2.0, "each": [s - spread, s + spread] * (n // 2)}
        for (task, n), s in zip(SAMPLES.items(), scores)
    }
    means = {"groups": {}, "over_groups": 12.5, "over_tasks": sum(scores) / len(scores)}
    about = {"benchmark": "longbench", "max_length": 31000, "questions": dict.fromkeys(SAMPLES, "digest")}
    return write_run(out, mode, budget, {"tasks": tasks, **means}, **{**about, **config})


@pytest.fixture
def runs(tmp_path):
    for (mode, budget), scores in SCORES.items():
        make_run(tmp_path / "runs", mode, budget, scores)
    return tmp_path / "runs"


def cells(path):
    return [line for line in csv.reader(path.read_text().splitlines())]


def test_scores_in_the_papers_layout(runs, tmp_path):
    out = tmp_path / "out"
    write_report([runs], out)
    # single-doc QA: (200 * 27 + 100 * 60) / 300; average: over all 500 samples
    assert cells(out / "tables" / "accuracy-big-7b.csv") == [
        "Method,Budget,single-doc QA,multi-doc QA,summarization,few-shot,synthetic,code,Avg.".split(","),
        ["Vanilla / lossless SD", "-", "40.00", "-", "20.00", "90.00", "-", "-", "46.00"],
        ["StreamingLLM", "512", "20.00", "-", "10.00", "60.00", "-", "-", "26.00"],
        ["Quest*", "512", "38.00", "-", "20.00", "90.00", "-", "-", "44.80"],
        ["Dustin", "512", "39.00", "-", "19.00", "90.00", "-", "-", "45.20"],
        ["Oracle (upper bound)", "512", "40.67", "-", "21.00", "91.00", "-", "-", "46.80"],
        ["Dustin", "128", "31.00", "-", "18.00", "85.00", "-", "-", "39.20"],
    ]
    # the best two of a budget, equal ones alike; neither the lossless run, nor the oracle, nor one that stands alone
    text = (out / "tables" / "accuracy-big-7b.md").read_text()
    for line in (
        "| Vanilla / lossless SD | - | 40.00 | - | 20.00 | 90.00 | - | - | 46.00 |",
        "| StreamingLLM | 512 | 20.00 | - | 10.00 | <ins>60.00</ins> | - | - | 26.00 |",
        "| Quest* | 512 | <ins>38.00</ins> | - | **20.00** | **90.00** | - | - | <ins>44.80</ins> |",
        "| Dustin | 512 | **39.00** | - | <ins>19.00</ins> | **90.00** | - | - | **45.20** |",
        "| Oracle (upper bound) | 512 | 40.67 | - | 21.00 | 91.00 | - | - | 46.80 |",
        "| Dustin | 128 | 31.00 | - | 18.00 | 85.00 | - | - | 39.20 |",
    ):
        assert line in text
    drops = cells(out / "tables" / "accuracy-drop-big-7b.csv")
    assert drops[1][2:5] == ["40.00", "-", "20.00"]
    assert drops[4] == [
        "Dustin",
        "512",
        "39.00 (-1.00)",
        "-",
        "19.00 (-1.00)",
        "90.00 (+0.00)",
        "-",
        "-",
        "45.20 (-0.80 ± 0.19)",  # of 500 samples, with a variance of 4 ** 2 within tasks and 1.36 between them
        "45.20 (-0.80 ± 0.19)",
    ]
    assert drops[-2][:3] == ["Qwen2-7B, full cache +", "-", "39.04"] and drops[-1][3] == "37.54 (-3.24)"
    leads = cells(out / "tables" / "accuracy-lead-big-7b.csv")
    assert leads == [
        ["Method", "Budget", "Avg.", "Avg. but synthetic"],
        ["StreamingLLM", "512", "+19.20 ± 0.36", "+19.20 ± 0.36"],  # gaps of 15 (twice), 27, 9, 30: a deviation of 7.96
        ["Quest*", "512", "+0.40 ± 0.10", "+0.40 ± 0.10"],
        ["Oracle (upper bound)", "512", "-1.60 ± 0.04", "-1.60 ± 0.04"],
    ]
    by_task = cells(out / "tables" / "accuracy-tasks-big-7b.csv")
    assert by_task[0][2:] == [
        "narrativeqa",
        "multifieldqa_en",
        "multi_news",
        "triviaqa",
        "mean of tasks",
        "mean of groups",
    ]
    assert by_task[4][2:] == ["30.00", "57.00", "19.00", "90.00", "49.00", "12.50"]
    assert not list(out.rglob("variants*"))  # there is one variant alone


def test_chat_templates_are_said(tmp_path):
    for given, said in (
        ({"chat_template": True}, " in the chat template"),
        ({"chat_template": False}, " without a chat"),
    ):
        path = make_run(tmp_path / said, "full", None, SCORES["full", None], **given)
        assert f"prompts of at most 31000 tokens{said}" in accuracy_sections(read_sources([path]))[0].conditions


def test_conditions_are_said(runs, tmp_path):
    write_report([runs], tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    for said in (
        "Target Big-7B, draft org/small, bfloat16; greedy, acceptance real; gamma 3, batch 4, prompts of at most 31000 "
        "tokens, draft cache auto",
        "2 target heads of 1 layer, 3 draft heads of 2 layers, draft share 0.750",
        "Samples per task: 200 of narrativeqa; 100 of multifieldqa_en, multi_news, triviaqa.",
        "Measured on 2 x GPU 9 (driver 1.2, CUDA 13.0); torch 2.11.0, transformers 5.17.0, python 3.11.1, dustin_hf "
        "0.1.0; commit 0123456789ab, tracked files changed. Date: 2030-05-06. Command: `dustin-hf x --out y`.",
        "From `runs/full`, `runs/streaming-512`, ",
        "* Quest reads all of layers 0 and 1",
        "(tables/accuracy-big-7b.csv)",
    ):
        assert said in text
    assert "/data" not in text and str(tmp_path) not in text and "simulated" not in text
    # a run that has no conditions, beside one that was made elsewhere
    path = make_run(tmp_path / "other", "full", None, SCORES["full", None], conditions={"gpu": None, "commit": None})
    bare = make_run(tmp_path / "other", "draft", 128, SCORES["full", None], conditions=None)
    write_report([path, bare], tmp_path / "bare")
    text = (tmp_path / "bare" / "README.md").read_text()
    assert "Measured on no GPU; commit not recorded. GPU, commit and command were not recorded. From" in text


def test_variants_of_dustin(runs, tmp_path):
    make_run(runs, "target", 512, (29, 61, 22, 80))
    make_run(runs, "draft", 512, (28, 58.5, 19.5, 91))
    write_report([runs], tmp_path / "out")
    assert cells(tmp_path / "out" / "tables" / "variants-tasks-big-7b-k512.csv") == [
        ["Benchmark", "Dustin-T", "Dustin-D", "Dustin-H", "Best of them"],
        ["narrativeqa", "-1.00", "-2.00", "+0.00", "+0.00"],
        ["multifieldqa_en", "+1.00", "-1.50", "-3.00", "+1.00"],
        ["multi_news", "+2.00", "-0.50", "-1.00", "+2.00"],
        ["triviaqa", "-10.00", "+1.00", "+0.00", "+1.00"],
        ["Average", "-2.00", "-0.75", "-1.00", "+1.00"],
    ]
    assert cells(tmp_path / "out" / "tables" / "variants-big-7b-k512.csv") == [
        "Method,triviaqa score,triviaqa difference,multi_news score,multi_news difference".split(","),
        ["Dustin-T", "80.00", "-10.00", "22.00", "+2.00"],
        ["Dustin-D", "91.00", "+1.00", "19.50", "-0.50"],
        ["Dustin-H", "90.00", "+0.00", "19.00", "-1.00"],
    ]
    assert not list(tmp_path.rglob("variants*k128*"))


def test_what_is_missing_stays_missing(tmp_path):
    """Without a lossless run nothing is compared with one; without a variant its column is empty."""
    first = make_run(tmp_path / "a", "target", 64, SCORES["hybrid", 512])
    second = make_run(tmp_path / "a", "mine", 64, SCORES["hybrid", 128])
    (section,) = accuracy_sections(read_sources([first, second]))
    assert [table.name for table in section.tables] == ["accuracy-big-7b", "accuracy-tasks-big-7b"]
    assert [row[0] for row in section.tables[0].rows] == ["Dustin-T", "mine"]
    full = make_run(tmp_path / "a", "full", None, SCORES["full", None])
    third = make_run(tmp_path / "a", "hybrid", 64, SCORES["hybrid", 512])
    (section,) = accuracy_sections(read_sources([first, second, full, third]))
    (variants,) = [table for table in section.tables if table.name.startswith("variants-tasks")]
    assert variants.rows[0] == ("narrativeqa", "+0.00", "-", "+0.00", "+0.00") and variants.rows[-1][2] == "-"


def test_runs_that_cannot_be_compared_stand_apart(runs, tmp_path):
    other = make_run(tmp_path / "few", "streaming", 512, (99, 99, 99, 99), questions=dict.fromkeys(SAMPLES, "others"))
    sections = accuracy_sections(read_sources([runs, other, runs / "full"]))
    assert [len(section.tables[0].rows) for section in sections] == [6, 1]
    write_report([runs, other], tmp_path / "out")
    names = {path.name for path in (tmp_path / "out" / "tables").glob("accuracy-big*.csv")}
    assert names == {"accuracy-big-7b.csv", "accuracy-big-7b-2.csv"}
    assert "## LongBench: Big-7B with org/small (2)" in (tmp_path / "out" / "README.md").read_text()
    twice = make_run(tmp_path / "again", "full", None, SCORES["full", None])
    with pytest.raises(
        ValueError, match=r"again/full and .*runs/full are runs of one method on the same samples: give one"
    ):
        accuracy_sections(read_sources([runs, twice]))


def test_marks():
    values = [[1.0, 5.0], [3.004, None], [3.001, 5.0], [2.0, 4.0], [9.0, 9.0], [0.0, 7.0]]
    marks = best_and_second(values, [512, 512, 512, 512, None, 128], first=2)
    # 3.004 and 3.001 look alike; two that are best leave a second best; None does not compete, nor who is alone
    assert marks == {(1, 2): "best", (2, 2): "best", (3, 2): "second", (0, 3): "best", (2, 3): "best", (3, 3): "second"}
    table = Table("n", "t", ("a|b", "c"), (("x|y", "1"), ("z", "-")), "", {(0, 1): "best"})
    assert table.markdown() == "| a\\|b | c |\n|---|---:|\n| x\\|y | **1** |\n| z | - |"
    assert table.csv() == "a|b,c\nx|y,1\nz,-\n"
    with pytest.raises(ValueError, match="`rows` of n must have 2 cells each"):
        replace(table, rows=(("x",),))
    assert [number(x, sign=True) for x in (-0.001, 1.005, None, float("nan"))] == ["+0.00", "+1.00", "-", "-"]
    assert [tokens(n) for n in (8192, 131072, 5000)] == ["8K", "128K", "5000"]
    assert [slug(name) for name in ("Qwen/Qwen2.5-7B", "../..")] == ["qwen-qwen2.5-7b", "unnamed"]


def test_runs_that_are_refused(runs, tmp_path):
    def refused(message, *paths, error=ValueError):
        with pytest.raises(error, match=message):
            read_sources(paths)

    def changed(name, file, **fields):
        path = runs / name / file
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in {**content, **fields}.items() if value is not None}))
        return runs / name

    def written(name, text):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    refused("absent does not exist: give folders of runs, or JSON files", tmp_path / "absent", error=FileNotFoundError)
    refused("`paths` must hold at least one run, got none")
    (tmp_path / "empty" / "inside").mkdir(parents=True)
    refused("empty holds neither config.json .* nor report.json", tmp_path / "empty")
    (runs / "full" / "scores.json").unlink()
    refused("full has no scores.json: the run has not ended. Give its command again", runs)
    refused(
        "config.json is not a LongBench or RULER-style run: it lacks method",
        changed("hybrid-128", "config.json", method=None),
    )
    tasks = {"niah": {"score": 1, "samples": 1}}
    refused("has tasks that LongBench has not: niah", changed("quest-512", "scores.json", tasks=tasks))
    path = changed("streaming-512", "config.json", questions={"lcc": "x"})
    refused("must have the tasks of config.json, lcc, got multi_news, ", path)
    path = changed("hybrid-512", "config.json", benchmark="niah")
    refused("is a run of niah: tables are made of runs of longbench and ruler", path)
    path = changed("oracle-512", "scores.json", tasks={task: {"score": 1, "each": []} for task in SAMPLES})
    refused("oracle-512 is not an entry of the kind longbench: it lacks samples", path)
    refused("a.json is of no kind that a report knows: it has `bench` 'ruler'", written("a.json", '{"bench": "ruler"}'))
    refused("it has the fields b, c. Give a result of `dustin-hf bench`", written("b.json", '{"c": 1, "b": 2}'))
    refused("c.json is no JSON file", written("c.json", "{"))
    refused("d.json must hold one JSON object, got a list", written("d.json", "[]"))
    refused("lacks conditions, target, draft, acceptance, notes, rows", written("e.json", '{"bench": "decode"}'))
    torn = {"bench": "decode", **dict.fromkeys(("conditions", "target", "draft", "acceptance", "notes"), "")}
    refused("f.json is torn: no entries of the kind decode", written("f.json", json.dumps({**torn, "rows": None})))
    refused("g.json holds no entries of the kind decode", written("g.json", json.dumps({**torn, "rows": []})))


def snapshot(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_nothing_of_others_is_overwritten(runs, tmp_path, monkeypatch):
    out = tmp_path / "deep" / "out"
    files = write_report([runs], out)
    assert {path.relative_to(out).as_posix() for path in files} == snapshot(out).keys() - {"report_files.json"}
    held = snapshot(out)
    with pytest.raises(ValueError, match="out holds a report: choose another folder, or pass --force to overwrite it"):
        write_report([runs], out)
    # another report in its place: what it does not have is gone
    write_report([runs / "hybrid-512"], out, force=True)
    assert held.keys() - snapshot(out).keys() == {
        f"tables/accuracy-{name}-big-7b.{suffix}" for name in ("drop", "lead") for suffix in ("md", "csv")
    }
    held = snapshot(out)
    with monkeypatch.context() as patch:
        patch.setitem(write_module.SECTIONS, "longbench", lambda sources: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_report([runs], out, force=True)
    assert snapshot(out) == held and [path.name for path in out.parent.iterdir()] == ["out"]
    (out / "tables" / "mine.txt").write_text("mine")
    with pytest.raises(ValueError, match="holds files that are no report's: tables/mine.txt. Choose another folder"):
        write_report([runs], out, force=True)
    assert snapshot(out) == {**held, "tables/mine.txt": b"mine"}
    with pytest.raises(ValueError, match="must be a folder, got a file"):
        write_report([runs], out / "README.md", force=True)
    # lists of files that no report made
    for text in ('{"made_by": "me", "files": ["README.md"]}', "[]", "{", '{"files": 3, "made_by": "dustin-hf report"}'):
        (tmp_path / "report_files.json").write_text(text)
        with pytest.raises(ValueError, match="holds files that are no report's: .* and [0-9]+ more. Choose"):
            folder_module.check_folder(tmp_path, force=True)


def test_a_killed_report_can_be_made_again(runs, tmp_path, monkeypatch):
    """Wherever it was killed: what it left behind is known as its own."""
    move = os.replace
    files = write_report([runs], tmp_path / "whole")
    for last in range(len(files) + 1):
        out, calls = tmp_path / str(last), []
        write_report([runs / "hybrid-512"], out)

        def killed(*paths, last=last, calls=calls):
            if len(calls) == last:
                raise KeyboardInterrupt
            calls.append(move(*paths))

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "replace", killed)
            write_report([runs], out, force=True)
        write_report([runs], out, force=True)
        assert snapshot(out) == snapshot(tmp_path / "whole")


def test_the_command(runs, tmp_path):
    def invoke(*arguments):
        return CliRunner().invoke(cli.app(), ["report", *map(str, arguments)])

    result = invoke(runs, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "4 tables and 0 figures are in" in result.output
    result = invoke(runs, "--out", tmp_path / "out")
    assert result.exit_code == 1 and result.output.startswith("error: --out") and "pass --force" in result.output
    assert invoke(runs, runs / "full", "--out", tmp_path / "out", "--force").exit_code == 0
    result = invoke(tmp_path / "nothing", "--out", tmp_path / "other")
    assert result.exit_code == 1 and "error: " in result.output and not (tmp_path / "other").exists()
