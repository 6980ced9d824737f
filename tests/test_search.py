"""Algorithm 1 on traces with a known optimum and against brute force; the whole study, interrupted at every phase."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dustin_hf import DustinProfile
from dustin_hf.profile import CARD_NAME, PROFILE_NAME
from dustin_hf.profiling import identify, traces
from dustin_hf.profiling import search as search_module
from dustin_hf.profiling.prices import prices, reached
from dustin_hf.profiling.recovery import SCALE, Objective, Prepared, Sample
from dustin_hf.profiling.search import SearchSettings, brute_force, search
from dustin_hf.profiling.study import StudySettings, encode, profile_pair
from dustin_hf.profiling.traces import TraceSettings
from dustin_hf.testing import noisy_copy, tiny_model

POSITIONS = 40


class MadeUp:
    """Traces from plain lists of tensors `[W, ...]`, one entry of each for a sample."""

    def __init__(self, truth, history, lookahead, target=None, draft=None):
        self.settings = TraceSettings(
            target or tuple((i, (0,)) for i in range(history[0].shape[1])),
            draft or tuple((i, (0,)) for i in range(lookahead[0].shape[1])),
            window=1,
        )
        self.index = {"truth": [x.tolist() for x in truth]}
        self.samples = [
            Sample(
                self.settings,
                {
                    "truth": (t * SCALE).half(),
                    "new_mass": 1 - t.sum(2),
                    "history": (h * SCALE).half()[None],
                    "lookahead": (d * SCALE).half(),
                    "lengths": torch.full((len(t),), t.shape[2]),
                },
            )
            for t, h, d in zip(truth, history, lookahead)
        ]

    def __len__(self):
        return len(self.samples)

    def sample(self, i, device="cpu"):
        return self.samples[i]


def marked(positions, value=0.5, rest=0.0):
    row = torch.full((POSITIONS,), rest)
    row[positions] = value
    return row


def known_optimum(samples=3, windows=2):
    """k = 10, 8 of them free: 4 tokens that target layer 1 knows of, 3 that draft layer 2 does, 1 that 0 does."""
    truth, history, lookahead = [], [], []
    for seed in range(samples):
        places = torch.randperm(POSITIONS - 2, generator=torch.Generator().manual_seed(seed)) + 1
        a, b, c, junk = places[:4], places[4:7], places[7:8], places[8:16]
        truth.append(torch.stack([marked(places[:8], 0.1), marked(places[:8], 0.05)]))
        history.append(torch.stack([marked(junk), marked(a, 0.5, 0.001), marked(a[:2], 0.4)]))
        lookahead.append(torch.stack([marked(c, 0.4), marked(junk, 0.001), marked(b, 0.5)]))
    return MadeUp(*([x.expand(windows, -1, -1) for x in rows] for rows in (truth, history, lookahead)))


def noise(seed, samples=3, windows=2, candidates=3):
    generator = torch.Generator().manual_seed(seed)

    def draw(rows):
        return [torch.rand(windows, rows, POSITIONS, generator=generator) / POSITIONS for _ in range(samples)]

    return MadeUp(draw(2), draw(candidates), draw(candidates))


SETTINGS = SearchSettings(budgets=(10,), target_layers=2, draft_layers=3, sinks=1, window=1, trials=25)


def test_the_known_optimum_is_found(tmp_path):
    result = search(known_optimum(), tmp_path, SETTINGS)
    assert (result.target, result.draft, result.splits) == ((1,), (2, 0), {10: 4})
    # layers of 0.8 and 0.4 on committed tokens, all of it kept
    assert result.arr[10] == pytest.approx(1, abs=1e-3)
    rounds = [(found["model"], found["taken"]) for found in result.rounds]
    assert rounds == [("target", 1), ("target", None), ("draft", 2), ("draft", 0), ("draft", None)]
    assert brute_force(known_optimum(), SETTINGS) == ((1,), (0, 2), {10: 4})


def test_a_search_for_some_layers_recovers_theirs(tmp_path):
    """Two layers that look at other tokens, each known to signals of its own: a set for each keeps all of both."""
    places = torch.randperm(POSITIONS - 2, generator=torch.Generator().manual_seed(0))[:16] + 1
    truth = torch.stack([marked(places[:8], 0.1), marked(places[8:], 0.1)])
    history = torch.stack([marked(places[:4]), marked(places[8:12]), marked(places[-1:])])
    lookahead = torch.stack([marked(places[4:8]), marked(places[12:]), marked(places[:1])])
    traces = MadeUp(*([x.expand(2, -1, -1)] * 3 for x in (truth, history, lookahead)))
    settings = replace(SETTINGS, target_layers=1, draft_layers=1)
    for layer in (0, 1):
        found = search(traces, tmp_path / str(layer), settings, layers=[layer])
        assert (found.target, found.draft, found.splits[10]) == ((layer,), (layer,), 4)
        table = reached(Objective(traces, [0, 1], 1, 1, layers=[layer]), found)["10"]
        assert table["hybrid"] == table["oracle"] == pytest.approx(1, abs=1e-3)
    both = search(traces, tmp_path / "both", settings)
    table = reached(Objective(traces, [0, 1], 1, 1), both)["10"]
    # 8 free slots for 16 tokens, 10 for the oracle, which protects none; the window's own tokens have 0.2
    assert table["hybrid"] == pytest.approx(0.2 + 0.8 * 8 / 16, abs=1e-3)
    assert table["oracle"] == pytest.approx(0.2 + 0.8 * 10 / 16, abs=1e-3)
    with pytest.raises(ValueError, match=r"other \['layers'\]"):
        search(traces, tmp_path / "0", settings, layers=[1])


def test_prices_of_fewer_heads_and_layer_groups(tmp_path):
    """Each line is the search it says it is, on its own candidates and layers."""
    data = noise(5, candidates=6)
    target = tuple((layer, chosen) for chosen in ((0,), (0, 1), (0, 1, 2, 3)) for layer in range(2))
    traces = MadeUp([s.truth() for s in data.samples], *raw(data), target=target)
    settings = replace(SETTINGS, target_layers=1, draft_layers=3, trials=8, target=(4, 5), draft=(0, 1, 2))
    table = prices(traces, tmp_path, settings, [0, 1], [2])
    assert tuple(table["heads"]) == NUMBERS_OF_HEADS and list(table["groups"]) == ["1", "2"]
    for name, places, layers in (("1 + 4", (0, 1), 1), ("2 + 8", (2, 3), 2)):
        found = search(traces, tmp_path / name, replace(settings, target=places, draft_layers=layers), [0, 1])
        assert table["heads"][name] == reached(Objective(traces, [2], 1, 1), found)
    halves = []
    for i in (0, 1):
        found = search(traces, tmp_path / f"layer {i}", settings, [0, 1], layers=[i])
        halves.append(reached(Objective(traces, [2], 1, 1, layers=[i]), found)["10"])
    for name in ("hybrid", "oracle"):
        assert table["groups"]["2"]["10"][name] == pytest.approx(sum(half[name] for half in halves) / 2)
    assert table["groups"]["1"] == table["heads"]["4 + 12"]
    assert prices(traces, tmp_path, settings, [0, 1], [2]) == table


NUMBERS_OF_HEADS = "1 + 4", "1 + 8", "2 + 8", "4 + 12"


def raw(traces):
    """Histories and lookaheads of all candidates, as `MadeUp` takes them."""
    return [
        [torch.stack([getattr(s, name)([i]) for i in range(len(kinds))], 1) for s in traces.samples]
        for name, kinds in (("history", traces.settings.target), ("lookahead", traces.settings.draft))
    ]


def test_each_budget_has_its_own_split(tmp_path):
    settings = replace(SETTINGS, budgets=(10, 5), trials=20)
    result = search(known_optimum(), tmp_path, settings)
    found = brute_force(known_optimum(), settings)
    assert result.splits[10] == found[2][10] == 4
    for budget in (10, 5):
        best = best_of_all(known_optimum(), settings, (1,), (2, 0), budget)
        assert result.arr[budget] == pytest.approx(best, abs=1e-9)


def best_of_all(traces, settings, target, draft, budget, values=None):
    """ARR with the best of some values of m, or of all."""
    prepared = list(map(Objective(traces, range(len(traces)), 1, 1).prepared, range(len(traces))))
    return max(
        sum(p.arr(p.sample.history(target), p.sample.lookahead(draft), budget, m) for p in prepared) / len(prepared)
        for m in (range(settings.most(budget) + 1) if values is None else values)
    )


@pytest.mark.parametrize("seed", range(2))
def test_greedy_rounds_take_the_best_by_hand(tmp_path, seed):
    """One layer of each is a plain maximum; and nothing beats brute force."""
    traces, settings = noise(seed), replace(SETTINGS, target_layers=1, draft_layers=1, trials=30)
    result = search(traces, tmp_path, settings)
    prepared = list(map(Objective(traces, range(3), 1, 1).prepared, range(3)))

    def history_only(i):
        return sum(p.arr(p.sample.history([i]), p.sample.history([i]), 10, 0) for p in prepared)

    def hybrid(i):
        h = [p.sample.history(result.target) for p in prepared]
        return sum(p.arr(x, p.sample.lookahead([i]), 10, m) for p, x in zip(prepared, h) for m in (2, 4, 5))

    assert result.target == (max(range(3), key=history_only),)
    assert result.draft == (max(range(3), key=hybrid),)
    # noise has no slope towards the best m, but the found one is as good as it says, and as those tried on principle
    chosen = traces, settings, result.target, result.draft, 10
    assert result.arr[10] == pytest.approx(best_of_all(*chosen, [result.splits[10]]))
    assert best_of_all(*chosen, [0, 8]) <= result.arr[10] <= best_of_all(*chosen)
    target, draft, splits = brute_force(traces, settings)
    assert best_of_all(traces, settings, target, draft, 10, [splits[10]]) >= best_of_all(*chosen)


def test_a_layer_is_taken_once_and_only_open_candidates(tmp_path):
    candidates = ((0, (0,)), (1, (0,)), (1, (1,)))
    traces = MadeUp(
        [s.truth() for s in noise(0).samples],
        [s.tensors["history"][0].float() / SCALE for s in noise(0).samples],
        [s.tensors["lookahead"].float() / SCALE for s in noise(0).samples],
        candidates,
        candidates,
    )
    result = search(traces, tmp_path, replace(SETTINGS, min_gain=-1.0, trials=2, target=(1, 2)))
    assert len(result.target) == 1 and set(result.target) <= {1, 2}
    assert sorted(candidates[i][0] for i in result.draft) == [0, 1]


@pytest.mark.parametrize("calls", [1, 30, 75, 110, 117, 125])
def test_a_search_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, calls):
    """Killed anywhere, in the middle of a trial too: the same rounds, the same trials, the same m."""
    traces, settings = noise(5), replace(SETTINGS, budgets=(10, 6), target_layers=1, draft_layers=2, trials=14)
    whole = search(traces, tmp_path / "whole", settings)
    arr, left = Prepared.arr, [calls]

    def interrupt(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return arr(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Prepared, "arr", interrupt)
        with pytest.raises(KeyboardInterrupt):
            search(traces, tmp_path / "parts", settings)
    assert search(traces, tmp_path / "parts", settings) == whole
    states = {state for trials in trials_of(tmp_path / "parts", failed=True).values() for _, state, _ in trials}
    assert ("FAIL" in states) == (calls > 114)  # rounds take 108 calls, starts 6
    assert trials_of(tmp_path / "parts") == trials_of(tmp_path / "whole")
    monkeypatch.setattr(Prepared, "arr", None)  # all is known now, but for the signals
    assert search(traces, tmp_path / "parts", settings) == whole


def trials_of(folder, failed=False):
    """m, state and steps of the trials of each budget; of those that were interrupted only if asked for."""
    with search_module._storage(folder / "optuna.db") as storage:
        studies = {s.study_name: storage.get_all_trials(s._study_id) for s in storage.get_all_studies()}
    return {
        name: [(t.params["m"], t.state.name, t.intermediate_values) for t in trials if failed or t.state.name != "FAIL"]
        for name, trials in studies.items()
    }


def test_bad_values_of_m_are_pruned(tmp_path):
    search(known_optimum(samples=6), tmp_path, SETTINGS)
    states = [state for _, state, _ in trials_of(tmp_path)["budget 10"]]
    assert len(states) == 25 and states.count("PRUNED") > 2


def test_another_search_in_the_folder_is_refused(tmp_path):
    search(noise(0), tmp_path, replace(SETTINGS, trials=2))
    for found, settings, numbers, what in [
        (noise(0), replace(SETTINGS, trials=3), None, "settings"),
        (noise(1), replace(SETTINGS, trials=2), None, "traces"),
        (noise(0), replace(SETTINGS, trials=2), [0, 1], "numbers"),
    ]:
        with pytest.raises(ValueError, match=rf"search.json is of a search with other \['{what}'\]"):
            search(found, tmp_path, settings, numbers)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budgets": (2,)}, "`budgets` must each be above sinks"),
        ({"budgets": ()}, "`budgets`"),
        ({"search_shares": (0.0,)}, "`search_shares`"),
        ({"draft_layers": 0}, "`draft_layers` must be at least 1"),
        ({"trials": 0}, "`trials` must be at least 1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        replace(SETTINGS, **options)


def test_texts_shorter_than_the_budget(tmp_path):
    with pytest.raises(ValueError, match="longest context has 40 tokens, so a budget of 64 keeps all"):
        search(noise(0), tmp_path, replace(SETTINGS, budgets=(10, 64)))


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
    for name in (PROFILE_NAME, CARD_NAME, "report.json"):
        assert (tmp_path / name).read_bytes() == (whole.out / name).read_bytes()


def test_a_study_with_comparisons(study_pair, tokenizer, tmp_path):
    with pytest.raises(ValueError, match="`compare` needs `heads_per_layer` 4, got 2"):
        run(study_pair, tokenizer, tmp_path, compare=True)
    texts = {f"{i}.txt": " ".join(random.Random(i).choices(WORDS, k=45 + i)) + "." for i in range(2)}
    profile = run(
        study_pair, tokenizer, tmp_path, texts=texts, budgets=(24,), heads_per_layer=4, trials=3, compare=True
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["prices"]["groups"]) == {"1", "2"} and set(report["prices"]["heads"]) == set(NUMBERS_OF_HEADS)
    # the same search as the study's own, but for the number of draft layers
    assert (
        report["prices"]["heads"]["4 + 12"]["24"]["hybrid"] >= report["prices"]["heads"]["1 + 4"]["24"]["hybrid"] - 0.05
    )
    assert profile == DustinProfile.from_pretrained(tmp_path)
    assert [len(heads) for _, heads in report["candidates"]["target"]] == [4, 4, 4, 1, 1, 1, 2, 2, 2]


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
    monkeypatch.setattr("dustin_hf.profiling.study.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"profiling needs optuna: pip install 'dustin_hf\[search\]'"):
        run(study_pair, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_long_texts_lose_their_middle(tokenizer):
    assert encode(tokenizer, "abcdefghij", StudySettings(max_context=7)) == encode(
        tokenizer, "abcdhij", StudySettings()
    )
