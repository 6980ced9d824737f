"""Commands refuse rows that are longer than a model allows, before they read its weights."""

import json

import pytest
from test_ruler import bytes_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from dustin_hf import cli
from dustin_hf.testing import tiny_model


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
    "command, options, longest",
    [
        # 64 new tokens for a line of code
        ("longbench", ("--data", "data", "--task", "lcc", "--max-length", 1000), 1064),
        ("ruler", ("--task", "niah_single", "--length", 1500, "--texts", "texts"), 1500),
        ("pg19", ("--context", 1000, "--new-tokens", 30, "--samples", 1, "--texts", "texts"), 1030),
        ("pg19", ("--context", 900, "--new-tokens", 30, "--drift", 150, "--samples", 1, "--texts", "texts"), 1050),
        ("fidelity", ("--context", 1000, "--new-tokens", 25, "--samples", 1, "--texts", "texts"), 1025),
    ],
)
def test_rows_beyond_a_model(folder, tmp_path, monkeypatch, command, options, longest):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    monkeypatch.chdir(folder)
    arguments = [command, "--target", "target", "--draft", "draft", "--out", tmp_path / "out", *options]
    result = CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert result.exit_code == 1
    assert f"make up to {longest} positions, the draft's limit is 1024" in result.output
    assert not (tmp_path / "out").exists()
