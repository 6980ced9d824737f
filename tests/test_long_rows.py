"""Commands refuse rows that are longer than a model allows, before they read its weights."""

import json

import pytest
from test_ruler import bytes_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dustin_hf import cli
from dustin_hf.testing import tiny_model
from dustin_hf.validation import check_positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, tokenizer = tmp_path_factory.mktemp("pair"), bytes_tokenizer()
    for name, positions in (("target", 2048), ("draft", 1024)):
        tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=positions).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("The cat sat on the mat. " * 400)
    (folder / "data").mkdir()
    fields = {"input": "", "context": "a = 1\n", "answers": ["b"], "length": 1, "dataset": "lcc", "language": "en"}
    line = json.dumps({**fields, "all_classes": None, "_id": "0"})
    (folder / "data" / "lcc.jsonl").write_text(line + "\n")
    return folder


@pytest.mark.parametrize(
    "command, options, said",
    [
        # 64 new tokens for a line of code
        ("longbench", ("--data", "data", "--task", "lcc", "--max-length", 2000), "2064 positions, the target's"),
        ("ruler", ("--task", "niah_single", "--length", 2500), "2500 positions, the target's limit is 2048"),
        ("pg19", ("--context", 2040, "--new-tokens", 30, "--samples", 1), "2070 positions, the target's"),
        ("pg19", ("--context", 1000, "--new-tokens", 30, "--samples", 1), "1030 positions, the draft's limit is 1024"),
        (
            "pg19",
            ("--context", 900, "--new-tokens", 9, "--drift", 1200, "--samples", 1),
            "2100 positions, the target's",
        ),
        ("fidelity", ("--context", 1000, "--new-tokens", 25, "--samples", 1), "1025 positions, the draft's"),
    ],
)
def test_rows_beyond_a_model(folder, tmp_path, monkeypatch, command, options, said):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.chdir(folder)
    arguments = [command, "--target", "target", "--draft", "draft", "--out", tmp_path / "out", *options]
    arguments += [] if command == "longbench" else ["--texts", "texts"]
    result = CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert result.exit_code == 1
    assert f"make up to {said}" in result.output
    assert not (tmp_path / "out").exists()


def test_a_shorter_draft_is_no_obstacle(folder, tmp_path, monkeypatch):
    """It may be fed more positions than it was trained for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folder)
    arguments = ["ruler", "--target", "target", "--draft", "draft", "--out", str(tmp_path / "out"), "--texts", "texts"]
    arguments += ["--task", "niah_single", "--length", "1500", "--samples", "1", "--budget", "64", "--device", "cpu"]
    assert CliRunner().invoke(cli.app(), arguments).exit_code == 0


def test_scaled_positions():
    """YaRN reaches further than the positions that a model was trained on; other scalings say theirs themselves."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    config = tiny_model("qwen2", rope_parameters={**yarn, "rope_theta": 10000.0}).config
    check_positions(config, 2048)
    with pytest.raises(ValueError, match="make up to 2049 positions, the draft's limit is 2048"):
        check_positions(config, 2049, "draft")
    with pytest.raises(ValueError, match="the target's limit is 512"):
        check_positions(tiny_model("qwen2").config, 513)
