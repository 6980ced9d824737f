"""Books: passages, perplexity against a dense computation, drift, and the command."""

import json
import math

import pytest
import torch
from helpers import Counted, plain
from test_profile_cli import folders, pair_of  # noqa: F401
from typer.testing import CliRunner

from dustin_hf import DustinProfile, cli
from dustin_hf.eval.fidelity import agreement
from dustin_hf.eval.pg19 import drift as drift_module
from dustin_hf.eval.pg19 import perplexity as perplexity_module
from dustin_hf.eval.pg19.books import INSTRUCTION, Passage, load_books, passages
from dustin_hf.eval.pg19.drift import drift, rouge_l
from dustin_hf.eval.pg19.perplexity import perplexity
from dustin_hf.testing import noisy_copy, random_prompts, tiny_model


class Words:
    """A tokenizer of numbers: one token a word, and a BOS."""

    bos_token_id = 1

    def __call__(self, text, add_special_tokens=True, **options):
        if isinstance(text, list):
            return {"input_ids": [self(one, add_special_tokens)["input_ids"] for one in text]}
        words = [int(word) if word.isdigit() else 7 for word in text.split()]
        return {"input_ids": [1] * add_special_tokens + words}


def test_passages_are_cut_where_the_book_goes_on():
    books = {"a": " ".join(map(str, range(100, 200))), "b": " ".join(map(str, range(300, 340)))}
    cut = passages(books, Words(), 10, 3, 4)
    assert len(cut) == 4 and len({passage.name for passage in cut}) == 4
    for passage in cut:
        assert len(passage.context) == 10 and len(passage.following) == 3
        bos, *together = passage.context + passage.following
        assert bos == 1 and together == list(range(together[0], together[0] + 12))
    front = len(Words()(INSTRUCTION)["input_ids"])
    (story,) = passages(books, Words(), front + 5, 1, 1, story=True)
    assert story.context[:front] == [1] + [7] * (front - 1) and len(story.context) == front + 5
    with pytest.raises(ValueError, match="hold 2 passages of 49 tokens, 3 are asked for"):
        passages(books, Words(), 47, 3, 3)
    with pytest.raises(ValueError, match=f"above the {front} tokens of the instruction or BOS, got {front}"):
        passages(books, Words(), front, 1, 1, story=True)


@pytest.fixture
def models():
    target = tiny_model("qwen2", num_hidden_layers=2)
    return target, noisy_copy(target, 0.1)


def test_perplexity_of_the_full_cache_is_the_models_own(models):
    target, draft = models
    texts = random_prompts([50, 41, 50])
    chosen = [Passage(str(i), ids[:-9], ids[-9:]) for i, ids in enumerate(texts)]
    profile = DustinProfile.default(target.config, draft.config)
    rows = perplexity(target, draft, chosen, profile, [24, 400], batch_size=2)
    expected = []
    for ids in texts:
        with torch.no_grad():
            logits = target(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        # the first token that follows is given, the eight after it are predicted
        expected.append(float(-logits[-9:-1].gather(1, torch.tensor(ids[-8:])[:, None]).mean()))
    found = {(row["mode"], row["budget"]): row for row in rows}
    assert found["full", None]["passages"] == pytest.approx([math.exp(x) for x in expected], rel=1e-4)
    assert found["full", None]["perplexity"] == pytest.approx(math.exp(sum(expected) / 3), rel=1e-4)
    for mode in ("hybrid", "target", "draft", "streaming"):
        assert found[mode, 400]["perplexity"] == pytest.approx(found["full", None]["perplexity"], rel=1e-4)
        assert abs(found[mode, 24]["perplexity"] / found["full", None]["perplexity"] - 1) > 1e-4
    with pytest.raises(ValueError, match="as many following tokens, at least two, got \\[1\\]"):
        perplexity(target, draft, [Passage("x", [5, 6], [7])], profile, [24])


def test_drift_judges_free_runs_part_by_part(models, monkeypatch):
    target, draft = models
    monkeypatch.setattr(drift_module, "PART", 20)
    prompts = random_prompts([40, 33])
    chosen = [Passage(str(i), ids, []) for i, ids in enumerate(prompts)]
    profile, own = DustinProfile.default(target.config, draft.config), target.generation_config.eos_token_id
    rows = drift(target, draft, chosen, profile, [24], new_tokens=50)
    assert target.generation_config.eos_token_id == own and [row["budget"] for row in rows] == [None, 24]
    assert [len(row["parts"]) for row in rows] == [3, 3] and all(1 <= row["tau"] <= 4 for row in rows)
    assert [part["agreement"] for part in rows[0]["parts"]] == [1.0] * 3
    target.generation_config.eos_token_id = None
    nll, whole = [0.0] * 3, []
    for ids in prompts:
        text = torch.tensor([*ids, *plain(target, ids, new=50)])
        scores = target(text[None, :-1]).logits[0, len(ids) - 1 :].double().log_softmax(-1)
        each = -scores.gather(1, text[len(ids) :, None])[:, 0]
        for i in range(3):
            nll[i] += float(each[20 * i : 20 * i + 20].mean().detach()) / 2
        whole.append(agreement(target, text, len(ids)))
    assert "rouge_l" not in rows[0]["parts"][0]
    assert [part["perplexity"] for part in rows[0]["parts"]] == pytest.approx([math.exp(x) for x in nll], rel=1e-3)
    assert whole == [1.0, 1.0] and min(part["agreement"] for part in rows[1]["parts"]) < 1


def test_what_an_output_repeats():
    tokens = [*range(10), *range(10)]
    # the first 8-gram that comes again starts with the second 0
    assert drift_module._repeated(tokens) == [False] * 10 + [True] * 3
    assert drift_module._repeated([1] * 7) == []


def test_drift_has_the_metric_of_the_task(models, monkeypatch):
    target, draft = models
    monkeypatch.setattr(drift_module, "PART", 20)
    profile, ids = DustinProfile.default(target.config, draft.config), random_prompts([40])[0]
    own = plain(target, ids, new=30, eos_token_id=None)
    for reference, expected in ((own, [1.0, 1.0]), ([*own[:10], *[0] * 10, *own[20:], 0, 0], None)):
        (row,) = drift(target, draft, [Passage("x", ids, reference)], profile, [], new_tokens=30)
        found = [part["rouge_l"] for part in row["parts"]]
        assert expected is None or found == expected
    assert found[0] >= 0.5 and found == [rouge_l(own[:20], reference[:20]), rouge_l(own, reference[:30])]
    # paper of ROUGE: "police killed the gunman" and "police kill the gunman" share three of four
    assert rouge_l([1, 2, 3, 4], [1, 9, 3, 4]) == 0.75 and rouge_l([3, 4, 1, 2], [1, 2, 3, 4]) == 0.5


def test_books_of_a_folder(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.txt").write_text("one")
    assert load_books(tmp_path) == {"a.txt": "one", "b.txt": "two"} and load_books(tmp_path, 1) == {"a.txt": "one"}


def test_the_command(folders, monkeypatch):  # noqa: F811
    out = folders / "pg19.json"
    arguments = ["pg19", *pair_of(folders), "--texts", folders / "texts", "--context", 40, "--samples", 2]
    arguments += ["--new-tokens", 6, "--budget", 24, "--drift", 10, "--device", "cpu", "--out", out]
    monkeypatch.setattr("dustin_hf.eval.pg19.books.INSTRUCTION", "the cat")
    result = CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    for word in ("perplexity", "hybrid", "agreement", "streaming"):
        assert word in result.output
    held = json.loads(out.read_text())
    assert len(held["perplexity"]) == 5 and len(held["drift"]) == 2 and held["settings"]["context"] == 40
    again = CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert again.exit_code == 1 and "exists" in again.output

    monkeypatch.setattr(drift_module, "_parts", Counted(drift_module._parts, end=3))
    out.unlink()
    CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert not out.exists()
    # an interruption costs the output at hand, and the rest comes out as in one go
    monkeypatch.setattr(perplexity_module, "replay", None)
    result = CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    kept = json.loads(out.read_text())
    for row in (*kept["drift"], *held["drift"]):
        assert row.pop("tokens_per_s") > 0
    assert all(kept[name] == held[name] for name in ("perplexity", "drift", "settings", "passages"))
    assert not out.with_name("pg19.json.parts").exists()
    (folders / "texts" / "long.txt").write_text("the cat " * 900)  # both models have 512 positions
    result = CliRunner().invoke(cli.app(), [str(argument) for argument in (*arguments, "--force", "--drift", 500)])
    assert result.exit_code == 1 and "make up to 540 positions, the target's limit is 512" in result.output
