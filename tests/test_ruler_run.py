"""RULER-style tasks from samples to scores, and the command."""

import json

import pytest
from test_ruler import bytes_tokenizer
from typer.testing import CliRunner

from dustin_hf import cli
from dustin_hf.eval.answering import Method, Settings
from dustin_hf.eval.ruler import ruler_samples, score_task
from dustin_hf.eval.ruler.run import run_ruler
from dustin_hf.testing import noisy_copy, tiny_model

METHODS = [Method("full"), Method("hybrid", 64)]


@pytest.fixture(scope="module")
def models():
    tokenizer = bytes_tokenizer()
    target = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=2048)
    target.generation_config.eos_token_id = None
    return target, noisy_copy(target, 0.05), tokenizer


def test_answers_and_scores(models, tmp_path):
    samples = ruler_samples(models[2], ["niah_single", "vt"], [1500, 1800], per_cell=2)
    found = run_ruler(*models, samples, METHODS, tmp_path, Settings(batch_size=2))
    assert list(found) == ["full", "hybrid-64"] and found["full"].keys() == {"niah_single", "vt"}
    for name, tasks in found.items():
        assert json.loads((tmp_path / name / "scores.json").read_text()) == tasks
        for task, cells in tasks.items():
            assert list(cells) == ["1500", "1800"]
            for length, score in cells.items():
                lines = (tmp_path / name / f"{task}-{length}.jsonl").read_text().splitlines()
                records = {record["id"]: record for record in map(json.loads, lines)}
                chosen = [s for s in samples if (s.task, str(s.length)) == (task, length)]
                assert all(records[str(s.number)]["answers"] == list(s.answers) for s in chosen)
                assert all(record["prompt_tokens"] + record["new_tokens"] == int(length) for record in records.values())
                predictions = [records[str(s.number)]["prediction"] for s in chosen]
                assert score == score_task(predictions, [s.answers for s in chosen])
    # everything is there
    again = run_ruler(*models, samples, METHODS, tmp_path, Settings(batch_size=2))
    assert again == found
    with pytest.raises(ValueError, match="make up to 2500 positions, the target's limit is 2048"):
        run_ruler(*models, ruler_samples(models[2], ["vt"], [2500]), METHODS, tmp_path / "other")


def test_the_command(models, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for model, name in zip(models, ("target", "draft")):
        model.save_pretrained(tmp_path / name)
        models[2].save_pretrained(tmp_path / name)
    arguments = ["ruler", "--target", tmp_path / "target", "--draft", tmp_path / "draft", "--out", tmp_path / "run"]
    arguments += ["--task", "niah_single", "--length", 1500, "--samples", 1, "--budget", 64, "--device", "cpu"]

    def invoke(*more):
        return CliRunner().invoke(cli.app(), [str(argument) for argument in (*arguments, *more)])

    result = invoke()
    assert result.exit_code == 0, result.output
    for word in ("niah_single", "hybrid-64", "1500"):
        assert word in result.output
    for more, message in (
        (["--task", "magic"], "magic"),
        (["--method", "magic"], "--method must be of"),
        (["--texts", "nowhere"], "holds no .txt"),
    ):
        result = invoke(*more)
        assert result.exit_code == 1 and message in result.output, result.output
