"""The whole study of a pair: its profile and report, interrupted at every phase; texts that cannot be used."""

import json
import random
from types import SimpleNamespace

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dustin_hf import DustinProfile
from dustin_hf.profile import CARD_NAME, PROFILE_NAME
from dustin_hf.profiling import identify, traces
from dustin_hf.profiling import search as search_module
from dustin_hf.profiling.search import search
from dustin_hf.profiling.study import StudySettings, encode, profile_pair
from dustin_hf.profiling.traces import TraceSet
from dustin_hf.testing import noisy_copy, tiny_model


@pytest.fixture(scope="module")
def tokenizer():
    """One token for each character."""
    characters = [chr(i) for i in range(32, 127)]
    vocabulary = {c: i for i, c in enumerate(["<pad>", "<s>", "</s>", "<unk>", "\n", *characters])}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", pad_token="<pad>")


@pytest.fixture(scope="module")
def study_pair():
    target = tiny_model(num_hidden_layers=3, max_position_embeddings=1024)
    target.generation_config.eos_token_id = None
    return target, noisy_copy(target, 0.05)


WORDS = "amber river stone window garden seven quiet market lantern winter copper bridge".split()
TEXTS = {f"{i}.txt": " ".join(random.Random(i).choices(WORDS, k=45 + i)) + "." for i in range(5)}
OPTIONS = dict(
    budgets=(24, 48), gamma=3, heads_per_layer=2, draft_layers=2, trials=5, sinks=2, window=4, new_tokens=9,
    needle_lengths=(400, 9999), deltas=(1, 4),
)  # fmt: skip


def run(pair, tokenizer, out, progress=lambda *step: None, texts=TEXTS, **options):
    return profile_pair(*pair, tokenizer, texts, out, progress=progress, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def whole(study_pair, tokenizer, tmp_path_factory):
    out, steps = tmp_path_factory.mktemp("whole"), []
    profile = run(study_pair, tokenizer, out, lambda *step: steps.append(step))
    return SimpleNamespace(out=out, steps=steps, profile=profile)


def test_a_study_makes_a_profile_and_a_report(whole, study_pair):
    profile, (target, draft) = whole.profile, study_pair
    assert DustinProfile.from_pretrained(whole.out) == profile
    profile.check_pair(target.config, draft.config)
    assert all(len(chosen) == 2 for chosen in [*profile.target_heads.values(), *profile.draft_heads.values()])
    assert profile.num_assistant_tokens == 3 and set(profile.draft_shares) == {24, 48}
    assert profile.draft_share == profile.share_for(64) == profile.draft_shares[48]
    report = json.loads((whole.out / "report.json").read_text())
    assert report["held_out"] == ["1.txt"] and report["searched"] == ["0.txt", "2.txt", "3.txt", "4.txt"]
    for name in ("target", "draft"):
        taken = [found["taken"] for found in report["rounds"] if found["model"] == name and found["taken"] is not None]
        heads = {layer: tuple(chosen) for layer, chosen in (report["candidates"][name][i] for i in taken)}
        assert getattr(profile, f"{name}_heads") == heads and len(heads) <= 2
    policies = ["hybrid", "history", "lookahead", "streaming", "default", "oracle", "oracle_per_layer", "history_4"]
    for budget in ("24", "48"):
        table = report["arr"][budget]
        assert list(table) == policies
        assert table["oracle_per_layer"]["arr"] >= table["oracle"]["arr"] >= table["hybrid"]["arr"]
        assert len(table["hybrid"]["arr_per_layer"]) == len(report["new_mass"]) == 3
        assert profile.metadata["arr"][budget]["hybrid"] == pytest.approx(table["hybrid"]["arr"], abs=1e-5)
    assert {"target", "draft", "arr", "arr_committed", "calibration", "versions", "date"} == set(profile.metadata)
    card = (whole.out / CARD_NAME).read_text()
    assert "| 24 |" in card and "oracle_per_layer" in card
    phases = list(dict.fromkeys(phase for phase, _, _ in whole.steps))
    assert phases[:4] == ["target heads", "draft heads", "traces", "target layer 1"]
    assert phases[-2:] == ["split of budget 24", "split of budget 48"]


def test_a_study_goes_on_where_it_was_interrupted(whole, study_pair, tokenizer, tmp_path):
    """Once in the first and once in a later step of each phase, one after another in one folder."""
    stops = []
    for phase in dict.fromkeys(phase for phase, _, _ in whole.steps):
        steps = [step for step in whole.steps if step[0] == phase]
        stops += [steps[0], steps[len(steps) // 2]]

    for stop in dict.fromkeys(stops):

        def interrupt(*step, stop=stop):
            if step == stop:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(study_pair, tokenizer, tmp_path, interrupt)
        assert not (tmp_path / PROFILE_NAME).exists()
    assert run(study_pair, tokenizer, tmp_path) == whole.profile
    for name in (PROFILE_NAME, CARD_NAME):
        assert (tmp_path / name).read_bytes() == (whole.out / name).read_bytes()
    report, expected = (json.loads((folder / "report.json").read_text()) for folder in (tmp_path, whole.out))
    assert report.pop("conditions") == json.loads((tmp_path / "study.json").read_text())["conditions"]
    assert expected.pop("conditions")["command"] == ""
    assert report == expected


def test_a_study_with_comparisons(study_pair, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="`compare` needs `heads_per_layer` 4, got 2"):
        run(study_pair, tokenizer, tmp_path, compare=True)
    texts = {f"{i}.txt": " ".join(random.Random(i).choices(WORDS, k=45 + i)) + "." for i in range(2)}
    profile = run(
        study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), heads_per_layer=4, trials=3, compare=True
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["prices"]) == {"heads", "groups"} and set(report["prices"]["groups"]) == {"1", "2"}
    assert all(0 < row["24"]["hybrid"] <= row["24"]["oracle"] for row in report["prices"]["heads"].values())
    for name in ("target", "draft"):
        found = report["stability"][name]
        # all heads of a layer
        assert found["all"] == dict.fromkeys(("seed", "count", "length 400", "haystacks"), 1.0)
        assert found["profile"] == found["all"]
    times = json.loads((tmp_path / "times.json").read_text())
    assert {"target heads", "traces", "split of budget 24"} <= set(times) and all(x >= 0 for x in times.values())
    assert profile == DustinProfile.from_pretrained(tmp_path)
    # three layers, the default, and the best one and two heads of each layer
    assert [len(heads) for _, heads in report["candidates"]["target"]] == [4, 4, 4, 4, 1, 1, 1, 2, 2, 2]


def test_texts_of_which_a_half_is_shorter_than_a_needle(study_pair, tokenizer, tmp_path):
    texts = {name: TEXTS[name][:110] for name in ("0.txt", "1.txt")}
    options = {"budgets": (24,), "heads_per_layer": 4, "trials": 3, "compare": True}
    run(study_pair, tokenizer, tmp_path, texts=texts, **options)
    report = json.loads((tmp_path / "report.json").read_text())
    assert "prices" in report and report["stability"]["target"]["all"].keys() == {"seed", "count", "length 400"}


def test_texts_shorter_than_any_needle(study_pair, tokenizer, tmp_path):
    texts = {name: TEXTS[name][:60] for name in ("0.txt", "1.txt")}
    with pytest.raises(ValueError, match="are too short together for samples of 400 tokens"):
        run(study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), trials=3)


def test_a_study_goes_on_wherever_its_models_lie(study_pair, tokenizer, tmp_path, monkeypatch):
    texts = {name: TEXTS[name] for name in ("0.txt", "1.txt")}
    first = run(study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), trials=3)
    for model in study_pair:
        monkeypatch.setattr(model.config, "_name_or_path", "/somewhere/else")
    again = run(study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), trials=3)
    assert again.draft_heads == first.draft_heads
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(ValueError, match="search.json cannot be read .* remove it"):
        run(study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), trials=3)


def test_a_study_with_layer_groups(study_pair, tokenizer, tmp_path):
    texts = {f"{i}.txt": " ".join(random.Random(i).choices(WORDS, k=45 + i)) + "." for i in range(3)}
    profile = run(study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), trials=3, layer_groups=2)
    found = TraceSet(tmp_path / "traces")
    settings = StudySettings(**{**OPTIONS, "budgets": (24,), "trials": 3}).search(3, 3)
    assert [group.first_layer for group in profile.layer_groups] == [0, 2]
    for group, layers in zip(profile.layer_groups, ([0, 1], [2])):
        alone = search(found, tmp_path / f"alone{layers[0]}", settings, [0, 2], layers=layers)
        assert group.target_heads == dict(found.settings.target[i] for i in alone.target)
        assert group.draft_heads == dict(found.settings.draft[i] for i in alone.draft)
        assert group.draft_shares == {24: alone.splits[24] / 24}
    row = profile.metadata["arr"]["24"]
    assert row["hybrid_by_groups"] <= row["oracle_by_groups"] and row["oracle"] <= row["oracle_by_groups"]
    assert DustinProfile.from_pretrained(tmp_path) == profile
    with pytest.raises(ValueError, match="`layer_groups` must be between 1 and the 3 layers of the target, got 4"):
        run(study_pair, tokenizer, tmp_path / "more", texts=texts, budgets=(24,), trials=3, layer_groups=4)
    assert not (tmp_path / "more").exists()  # before anything is recorded


def test_a_finished_study_is_not_made_again(whole, study_pair, tokenizer, monkeypatch):
    for module, name in ((identify, "_score_sample"), (traces, "trace_samples"), (search_module, "_round")):
        monkeypatch.setattr(module, name, None)
    assert run(study_pair, tokenizer, whole.out) == whole.profile
    for options, what in [({"trials": 6}, "settings"), ({"texts": {**TEXTS, "0.txt": "b" * 300}}, "texts")]:
        with pytest.raises(ValueError, match=rf"is the folder of a study with other \['{what}'\]"):
            run(study_pair, tokenizer, whole.out, **options)


def test_texts_that_cannot_be_used(study_pair, tokenizer, tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("amber " * 40)
    with pytest.raises(ValueError, match="`texts` must be at least two"):
        run(study_pair, tokenizer, tmp_path / "out", texts=texts)
    (texts / "b.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ValueError, match=r"b\.txt cannot be read"):
        run(study_pair, tokenizer, tmp_path / "out", texts=texts)
    (texts / "b.txt").write_text("river " * 200)
    with pytest.raises(
        ValueError, match=r"text 'b\.txt' has 1200 tokens, with 9 new ones more than the 1024 positions"
    ):
        run(study_pair, tokenizer, tmp_path / "out", texts=texts)
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_said_before_the_work(study_pair, tokenizer, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        run((study_pair[0], tiny_model(vocab_size=2000)), tokenizer, tmp_path / "out")
    for options, message in (
        ({"budgets": (24, 4096)}, "a budget of 4096 keeps all of them and there is nothing to choose"),
        ({"budgets": (6,)}, r"`budgets` must each be above sinks \+ window = 6"),
        ({"new_tokens": 2}, "`new_tokens` must fill a window of 3, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            run(study_pair, tokenizer, tmp_path / "out", **options)
    monkeypatch.setattr("dustin_hf.profiling.study.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"profiling needs optuna: pip install 'dustin_hf\[search\]'"):
        run(study_pair, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_long_texts_lose_their_middle(tokenizer):
    assert encode(tokenizer, "abcdefghij", StudySettings(max_context=7)) == encode(
        tokenizer, "abcdhij", StudySettings()
    )
