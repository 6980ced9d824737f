"""Algorithm 1 on traces with a known optimum and against brute force; the price of fewer heads, layer groups."""

from dataclasses import replace

import pytest
import torch

from dustin_hf.profiling import search as search_module
from dustin_hf.profiling import traces as traces_module
from dustin_hf.profiling.prices import prices, reached
from dustin_hf.profiling.recovery import SCALE, Objective, Prepared, Sample
from dustin_hf.profiling.search import SearchSettings, brute_force, search
from dustin_hf.profiling.traces import TraceSettings

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


@pytest.mark.parametrize("calls", [1, 12, 20, 26, 33, 41])
def test_a_search_goes_on_where_it_was_interrupted(tmp_path, monkeypatch, calls):
    """Killed anywhere, in the middle of a trial too: the same rounds, the same trials, the same m."""
    traces, settings = noise(5), replace(SETTINGS, budgets=(10, 6), target_layers=1, draft_layers=2, trials=14)
    whole = search(traces, tmp_path / "whole", settings)
    left = [calls]

    def interrupted(measure):
        def call(*args):
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return measure(*args)

        return call

    with monkeypatch.context() as patch:
        for name in ("arr", "mean_arr"):
            patch.setattr(Prepared, name, interrupted(getattr(Prepared, name)))
        with pytest.raises(KeyboardInterrupt):
            search(traces, tmp_path / "parts", settings)
    assert search(traces, tmp_path / "parts", settings) == whole
    states = {state for trials in trials_of(tmp_path / "parts", failed=True).values() for _, state, _ in trials}
    assert ("FAIL" in states) == (calls > 30)  # rounds take 24 calls, starts 6
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


def test_a_torn_storage_is_named(tmp_path):
    (tmp_path / "optuna.db").write_bytes(b"SQLite format 3\0 and no more" * 40)
    with pytest.raises(ValueError, match=r"optuna\.db cannot be read .*: remove it, its trials are made again"):
        with search_module._storage(tmp_path / "optuna.db"):
            pass


def test_a_torn_trace_is_named(tmp_path):
    (tmp_path / "0-text.safetensors").write_bytes(b"\1")
    with pytest.raises(ValueError, match=r"0-text\.safetensors cannot be read .*: remove it, it is made again"):
        traces_module._Stored(tmp_path / "0-text.safetensors", "cpu")["positions"]
