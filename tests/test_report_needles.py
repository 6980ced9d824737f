"""Reports of RULER-style runs: cells by hand, which runs stand together, what is refused."""

import csv

import pytest
from test_report import write_run

from dustin_hf.eval.report.sources import read_sources
from dustin_hf.eval.report.write import write_report

SCORES = {
    ("full", None): {"niah_single": {"4096": 100.0, "10000": 90.0}, "vt": {"4096": 50.0, "10000": 40.0}},
    ("hybrid", 512): {"niah_single": {"4096": 100.0, "10000": 80.0}, "vt": {"4096": 40.0, "10000": 20.0}},
    ("quest", 512): {"niah_single": {"4096": 90.0, "10000": 85.0}, "vt": {"4096": 45.0, "10000": 10.0}},
}
CELLS = ("niah_single-4096", "niah_single-10000", "vt-4096", "vt-10000")


def make_run(out, mode, budget, scores, **config):
    about = {
        "target": {"id": "org/big", "hash": "a"},
        "questions": dict.fromkeys(CELLS, "digest"),
        "benchmark": "ruler",
        "conditions": {
            "date": "2030-05-06T07:08:09+00:00",
            "command": "dustin-hf ruler --samples 20",
            "commit": "c0ffee",
        },
        "weights": "of a file",
    }
    return write_run(out, mode, budget, scores, **{**about, **config})


@pytest.fixture
def runs(tmp_path):
    for (mode, budget), scores in SCORES.items():
        make_run(tmp_path / "runs", mode, budget, scores)
    return tmp_path / "runs"


def test_tables(runs, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    write_report([runs], out)
    assert list(csv.reader((out / "tables" / "ruler-org-big.csv").read_text().splitlines())) == [
        ["Method", "Budget", "4K", "10000"],
        ["Vanilla / lossless SD", "-", "75.00", "65.00"],
        ["Quest*", "512", "67.50", "47.50"],
        ["Dustin", "512", "70.00", "50.00"],
    ]
    by_task = list(csv.reader((out / "tables" / "ruler-tasks-org-big.csv").read_text().splitlines()))
    assert by_task[0] == ["Method", "Budget", "niah_single 4K", "niah_single 10000", "vt 4K", "vt 10000"]
    assert by_task[3] == ["Dustin", "512", "100.00", "80.00", "40.00", "20.00"]
    text = (out / "README.md").read_text()
    assert "| Dustin | 512 | **70.00** | **50.00** |" in text and "* Quest reads all of layers 0 and 1" in text
    assert "## RULER-style tasks: org/big with org/small" in text and "greedy, acceptance real; gamma 3" in text
    assert "Command: `dustin-hf ruler --samples 20`. Weights: of a file." in text


def test_runs_that_cannot_be_compared_stand_apart(runs, tmp_path):
    pytest.importorskip("matplotlib")
    make_run(tmp_path / "other", "hybrid", 512, SCORES["hybrid", 512], questions=dict.fromkeys(CELLS, "another"))
    write_report([runs, tmp_path / "other"], tmp_path / "out")
    assert (tmp_path / "out" / "README.md").read_text().count("\n## RULER-style tasks") == 2
    with pytest.raises(ValueError, match="are runs of one method on the same samples: give one"):
        make_run(tmp_path / "twice", "hybrid", 512, SCORES["hybrid", 512])
        write_report([runs, tmp_path / "twice"], tmp_path / "out", force=True)


def test_runs_that_are_refused(tmp_path):
    for name, scores, message in (
        ("short", {"vt": {"4096": 1.0, "10000": 1.0}}, "must have the tasks of config.json, niah_single-10000, "),
        ("none", {}, "must have the tasks of config.json"),
        ("torn", {"vt": 3}, "is torn"),
        ("null", {"vt": {"4096": None}}, "is torn"),
    ):
        with pytest.raises(ValueError, match=message):
            read_sources([make_run(tmp_path / name, "full", None, scores)])
    path = make_run(tmp_path / "method", "full", None, SCORES["full", None], method={})
    with pytest.raises(ValueError, match="config.json is not a run of one method: it lacks mode, budget"):
        read_sources([path])
    path = make_run(tmp_path / "open", "full", None, {})
    (path / "scores.json").unlink()
    with pytest.raises(ValueError, match=r"has no scores.json: the run has not ended. Give its command again"):
        read_sources([path])


def test_tasks_of_different_lengths(tmp_path):
    """Means are of the lengths that all tasks have."""
    pytest.importorskip("matplotlib")
    scores = {"niah_single": {"4096": 100.0, "10000": 90.0}, "vt": {"10000": 40.0}}
    cells = ("niah_single-4096", "niah_single-10000", "vt-10000")
    make_run(tmp_path / "runs", "full", None, scores, questions=dict.fromkeys(cells, "digest"))
    write_report([tmp_path / "runs"], tmp_path / "out")
    tables = tmp_path / "out" / "tables"
    assert (tables / "ruler-org-big.csv").read_text().splitlines()[0] == "Method,Budget,10000"
    assert (tables / "ruler-tasks-org-big.csv").read_text().splitlines() == [
        "Method,Budget,niah_single 4K,niah_single 10000,vt 10000",
        "Vanilla / lossless SD,-,100.00,90.00,40.00",
    ]


def test_where_a_run_went_on_is_said(tmp_path):
    pytest.importorskip("matplotlib")
    later = [{"date": "2030-05-09T07:08:09+00:00", "command": "dustin-hf ruler --samples 20", "commit": "facade"}]
    make_run(tmp_path / "runs", "full", None, SCORES["full", None], continued=later)
    write_report([tmp_path / "runs"], tmp_path / "out")
    text = (tmp_path / "out" / "README.md").read_text()
    assert "commit c0ffee; and on no GPU; commit facade. Date: 2030-05-06, 2030-05-09." in text
