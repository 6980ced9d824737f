"""The commands `profile` and `fidelity`, their one-line errors, and the figures."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer import Exit
from typer.main import get_command
from typer.testing import CliRunner

from dustin_hf import cli
from dustin_hf.console import one_line_errors
from dustin_hf.profiling.cli import cut
from dustin_hf.testing import tiny_model
from dustin_hf.texts import read_texts

WORDS = "a the cat dog sat ran on under mat tree and saw it then".split()
COMMON = ["--device", "cpu"]


@pytest.fixture
def folders(tmp_path):
    """A target and a draft with a tokenizer, and two texts."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    for seed, name in enumerate(("target", "draft")):
        tiny_model("llama", seed=seed, vocab_size=len(vocabulary)).save_pretrained(tmp_path / name)
        fast.save_pretrained(tmp_path / name)
    (tmp_path / "texts").mkdir()
    for i in range(2):
        words = [WORDS[(j * j + i) % len(WORDS)] for j in range(90)]
        (tmp_path / "texts" / f"{i}.txt").write_text(" ".join(words))
    return tmp_path


def invoke(*arguments):
    return CliRunner().invoke(cli.app(), [str(argument) for argument in arguments])


def pair_of(folders):
    return ["--target", folders / "target", "--draft", folders / "draft"]


@pytest.mark.parametrize("command", ["profile", "fidelity"])
def test_help(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    for option in ("--target", "--draft", "--texts", "--budget", "--out"):
        assert option in result.output


def test_fidelity(folders):
    out = folders / "result" / "fidelity.json"
    arguments = [*pair_of(folders), "--texts", folders / "texts", "--context", 60, "--samples", 2, "--new-tokens", 10]
    arguments += ["--budget", 24, "--budget", 30, "--mode", "hybrid", "--mode", "full", "--out", out, *COMMON]
    result = invoke("fidelity", *arguments)
    assert result.exit_code == 0, result.output
    for word in ("agreement", "KL", "ARR", "hybrid", "full"):
        assert word in result.output
    held = json.loads(out.read_text())
    assert [(row["mode"], row["budget"]) for row in held["results"]] == [("full", None), ("hybrid", 24), ("hybrid", 30)]
    assert [row["name"].split("@")[0] for row in held["contexts"]] == ["0.txt", "1.txt"]
    assert held["results"][0]["kl"] < 1e-6 and "torch" in held["conditions"]
    again = invoke("fidelity", *arguments)
    assert again.exit_code == 1 and "exists" in again.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--texts", "nowhere"], "holds no .txt"),
        (["--samples", "3"], "--texts hold 2 contexts of 60 tokens, 3 are asked for"),
        (["--mode", "magic"], "`mode` must be of hybrid"),
        (["--budget", "20"], "`budget` must be at least"),
        (["--profile", "nowhere"], "--profile nowhere"),
        (["--target", "nowhere"], "--target nowhere"),
        (["--new-tokens", "600"], "limit is 512"),
        (["--plots", "figures"], "give both"),
    ],
)
def test_errors_of_fidelity(folders, monkeypatch, arguments, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folders)
    base = [*pair_of(folders), "--texts", folders / "texts", "--context", 60, "--samples", 1, "--budget", 24, *COMMON]
    result = invoke("fidelity", *base, *arguments)
    assert result.exit_code == 1, result.output
    assert message in result.output.splitlines()[-1] and result.output.count("error: ") == 1


def test_profile_passes_on_what_it_was_given(folders, monkeypatch):
    """The study itself has tests of its own."""
    from dustin_hf import DustinProfile
    from dustin_hf.profiling import study

    seen = {}

    def profile_pair(target, draft, tokenizer, texts, out, **options):
        seen.update(texts=list(texts), out=out, **options)
        options["progress"]("search", 1, 2)
        return DustinProfile({1: (0,)}, {0: (1,)}, 0.75)

    monkeypatch.setattr(study, "profile_pair", profile_pair)
    monkeypatch.setattr("dustin_hf.console.needs", lambda library: None)
    arguments = [*pair_of(folders), "--texts", folders / "texts", "--out", folders / "study", *COMMON]
    result = invoke("profile", *arguments, "--quick", "--trials", 3, "--budget", 40)
    assert result.exit_code == 0, result.output
    assert "draft share 0.750" in result.output
    assert seen.pop("command").startswith("dustin-hf")
    del seen["progress"], seen["say"]
    assert seen == {
        "texts": ["0.txt", "1.txt"], "out": folders / "study", "budgets": [40], "gamma": 4, "trials": 3, "chat": False,
        "compare": False, "layer_groups": 1, "new_tokens": 32, "needle_lengths": (512,), "max_context": 2048,
    }  # fmt: skip
    result = invoke("profile", *arguments)
    assert seen["budgets"] == (128, 256, 512) and "trials" in seen

    def full_disk(*args, **options):
        raise RuntimeError("the disk is full") from OSError(28, "No space")

    monkeypatch.setattr(study, "profile_pair", full_disk)
    result = invoke("profile", *arguments)
    assert result.exit_code == 1 and "error: the disk is full" in result.output


def test_errors_are_one_line(folders, monkeypatch, capsys):
    """Also for what is no ValueError: a model that is not supported, a folder or file without a profile."""
    arguments = ["fidelity", *pair_of(folders), "--texts", folders / "texts", *COMMON]
    monkeypatch.setattr("huggingface_hub.hf_hub_download", None)  # nobody asks the Hub for what is a path
    for profile in (folders / "texts", folders / "none.json"):
        result = invoke(*arguments, "--profile", profile)
        assert result.exit_code == 1 and "does not exist: name a finished study" in result.output
    config = folders / "target" / "config.json"
    for device in ("nonsense", "cuda" if not torch.cuda.is_available() else "cuda:99"):
        result = invoke(*arguments[:-2], "--context", 20, "--samples", 1, "--device", device)
        assert result.exit_code == 1 and f"error: --device {device}: " in result.output, result.output
        assert isinstance(result.exception, SystemExit) and result.output.count("error: ") == 1
    for error, said in (
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "CUDA out of memory. Tried Lower --batch"),
        (OSError(), "OSError"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device: make room, and give"),
    ):
        with pytest.raises(Exit), one_line_errors():
            raise error
        assert f"error: {said}" in capsys.readouterr().err
    weights = folders / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    result = invoke(*arguments, "--context", 20, "--samples", 1)
    assert result.exit_code == 1 and f"error: --draft {folders / 'draft'}: " in result.output, result.output
    other = {**json.loads(config.read_text()), "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    config.write_text(json.dumps(other))
    result = invoke(*arguments, "--context", 20, "--samples", 1)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert result.output.strip().splitlines()[-1].startswith("error: ")


def test_built_in_texts_hold_the_default_contexts():
    """By a tokenizer of long tokens too."""
    options = {option.name: option.default for option in get_command(cli.app()).commands["fidelity"].params}

    class FiveLetters:
        bos_token_id = 0

        def __call__(self, given, **options):
            if isinstance(given, str):
                return {"input_ids": [0, 7]}
            return {"input_ids": [list(range(1, 1 + len(text) // 5)) for text in given]}

    contexts = cut(read_texts(None), FiveLetters(), options["context"], options["samples"])
    assert [len(ids) for ids in contexts.values()] == [options["context"]] * options["samples"]
    assert all(ids[0] == 0 and ids[1] > 0 for ids in contexts.values())
    with pytest.raises(ValueError, match="above the 1 tokens that start a text, got 1"):
        cut({"a": "x"}, FiveLetters(), 1, 1)
    with pytest.raises(ValueError, match="--texts hold nothing in b: leave them out"):
        cut({"a": "x", "b": " "}, FiveLetters(), 10, 2, whole=True)


def test_missing_extra(folders, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = invoke("profile", *pair_of(folders), "--out", folders / "study")
    assert result.exit_code == 1 and "pip install 'dustin_hf[search]'" in result.output


def made_up_report():
    def row(arr):
        return {"arr": arr, "arr_committed": arr - 0.1, "arr_per_layer": [arr - 0.02, arr, arr + 0.02]}

    names = ("hybrid", "history", "history_4", "lookahead", "oracle", "oracle_per_layer", "streaming", "default")
    tables = {str(k): {name: row(0.5 + k / 1000 + i / 100) for i, name in enumerate(names)} for k in (128, 512)}
    rounds = [
        {"model": "target", "arr": {"0": 0.5, "1": 0.7, "2": 0.6}, "taken": 1},
        {"model": "draft", "arr": {"0": 0.7, "1": 0.75}, "taken": 1},
        {"model": "draft", "arr": {"0": 0.74}, "taken": None},
    ]
    candidates = {"target": [[0, [1]], [1, [2]], [2, [0]]], "draft": [[0, [1]], [1, [0]]]}
    return {"arr": tables, "rounds": rounds, "candidates": candidates}


def made_up_fidelity():
    def run(mode, budget, kl):
        windows = {"kl": [kl, kl * 2], "arr": [0.8, 0.7], "arr_committed": [0.7, 0.6], "agreement": [1.0, 0.5]}
        one = {"agreement": 0.9, "kl": kl, "arr": 1 - kl, "arr_committed": 0.9 - kl, "windows": windows}
        short = {**one, "windows": {name: values[:1] for name, values in windows.items()}}
        nothing = {**dict.fromkeys(one), "windows": {name: [] for name in windows}}
        means = {name: one[name] for name in ("agreement", "kl", "arr", "arr_committed")}
        return {"mode": mode, "budget": budget, **means, "contexts": [one, short, nothing]}

    runs = [run(mode, k, (i + 1) / k) for i, mode in enumerate(("oracle", "hybrid", "registered")) for k in (128, 512)]
    results = [run("full", None, 0.0), *runs]
    return {"results": results, "settings": {"gamma": 4}, "pearson": {"runs": {"arr": -0.9}}}


def check_drawn(paths, names):
    assert sorted(path.name for path in paths) == sorted(f"{name}.{kind}" for name in names for kind in ("png", "svg"))
    for path in paths:
        content = path.read_bytes()
        assert len(content) > 2000
        assert content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content


def test_plots_of_a_study(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    import sys

    from dustin_hf.profiling.plots import plot_study

    loaded, before = "matplotlib.pyplot" in sys.modules, matplotlib.rcParams.copy()
    report = made_up_report()
    (tmp_path / "report.json").write_text(json.dumps(report))
    names = ["history", "lookahead", "layers", "one_set", "rounds"]
    check_drawn(plot_study(tmp_path, tmp_path / "figures"), names)
    assert matplotlib.rcParams.copy() == before and ("matplotlib.pyplot" in sys.modules) == loaded
    # only what there is
    for table in report["arr"].values():
        del table["lookahead"], table["oracle_per_layer"]
    (tmp_path / "report.json").write_text(json.dumps({**report, "rounds": []}))
    check_drawn(plot_study(tmp_path, tmp_path / "fewer"), ["history", "layers"])
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(ValueError, match="not a result that can be drawn"):
        plot_study(tmp_path, tmp_path)


def test_plot_of_tried_splits(tmp_path):
    pytest.importorskip("matplotlib")
    optuna = pytest.importorskip("optuna")
    from dustin_hf.profiling.plots import plot_study, tried_splits
    from dustin_hf.profiling.search import STORAGE_NAME

    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / STORAGE_NAME}")
    study = optuna.create_study(storage=storage, study_name="budget 128", direction="maximize")
    space = {"m": optuna.distributions.IntDistribution(0, 108)}
    for m, arr in ((96, 0.8), (0, 0.7), (108, 0.75)):
        study.add_trial(optuna.trial.create_trial(params={"m": m}, distributions=space, value=arr))
    storage.remove_session()
    storage.engine.dispose()
    assert tried_splits(tmp_path, [128, 512]) == {128: [(0, 0.7), (96, 0.8), (108, 0.75)]}
    (tmp_path / "report.json").write_text(json.dumps({"arr": made_up_report()["arr"]}))
    paths = plot_study(tmp_path, tmp_path / "figures")
    assert {"split.png", "split.svg"} <= {path.name for path in paths}


def test_plots_of_a_replay(tmp_path):
    pytest.importorskip("matplotlib")
    from dustin_hf.profiling.plots import plot_fidelity

    (tmp_path / "fidelity.json").write_text(json.dumps(made_up_fidelity()))
    check_drawn(plot_fidelity(tmp_path / "fidelity.json", tmp_path / "figures"), ["arr_kl", "budgets", "drift"])
    with pytest.raises(ValueError, match="not a result that can be drawn"):
        plot_fidelity(tmp_path / "absent.json", tmp_path)


def test_whole_texts_lose_their_middle():
    def words(text, verbose):
        return {"input_ids": list(map(int, text.split()))}

    texts = {"a": "1 2 3 4 5 6", "b": "7 8", "c": "9"}
    assert cut(texts, words, 5, 2, whole=True) == {"a": [1, 2, 3, 5, 6], "b": [7, 8]}
    with pytest.raises(ValueError, match="--texts hold 3 texts, 4 are asked for"):
        cut(texts, words, 5, 4, whole=True)
