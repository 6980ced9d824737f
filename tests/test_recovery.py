"""Recovery rates against hand computations; traces against a dense computation, and the texts they are made of."""

import errno
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import heads, plain

from dustin_hf.eval.pg19.books import load_books
from dustin_hf.profiling import traces as traces_module
from dustin_hf.profiling.progress import ProgressBars
from dustin_hf.profiling.recovery import (
    SCALE,
    Objective,
    history_set,
    hybrid_set,
    lookahead_set,
    oracle_set,
    policy_tables,
    streaming_set,
    windowed_arr,
)
from dustin_hf.profiling.study import validation_texts
from dustin_hf.profiling.traces import TraceSet, TraceSettings, as_candidates, record, size_estimate
from dustin_hf.testing import random_prompts, tiny_model

# One window over 8 committed tokens, two layers; each keeps 0.1 and 0.2 for the window's own tokens.
TRUTH = torch.tensor(
    [[[0.30, 0.02, 0.20, 0.03, 0.05, 0.10, 0.15, 0.05], [0.10, 0.25, 0.05, 0.20, 0.05, 0.05, 0.05, 0.05]]]
)
NEW = torch.tensor([[0.1, 0.2]])
LENGTHS = torch.tensor([8])
HISTORY = torch.tensor([[9.0, 1, 2, 8, 0, 3, 5, 4]])
LOOKAHEAD = torch.tensor([[1.0, 7, 6, 2, 3, 0, 1, 1]])


@pytest.mark.parametrize(
    "slots, expected",
    [
        # sinks 0, window 7, then of the rest the best by history: 3, 6
        (history_set(HISTORY, LENGTHS, 4, 1, 1), [0, 3, 6, 7]),
        (lookahead_set(LOOKAHEAD, LENGTHS, 4, 1, 1), [0, 1, 2, 7]),
        # one by lookahead (1), and the rest by history (3)
        (hybrid_set(HISTORY, LOOKAHEAD, LENGTHS, 4, 1, 1, 1), [0, 1, 3, 7]),
        (streaming_set(LENGTHS, 4, 1), [0, 5, 6, 7]),
        # means over layers: .20 .135 .125 .115 .05 .075 .10 .05
        (oracle_set(TRUTH, LENGTHS, 4), [0, 1, 2, 3]),
        (oracle_set(TRUTH, LENGTHS, 4, sinks=1, window=1), [0, 1, 2, 7]),
    ],
)
def test_arr_of_each_policy_by_hand(slots, expected):
    assert sorted(slots[0].tolist()) == expected
    a = sum(TRUTH[0, 0, i].item() for i in expected)
    b = sum(TRUTH[0, 1, i].item() for i in expected)
    torch.testing.assert_close(windowed_arr(TRUTH, NEW, slots), torch.tensor([[a + 0.1, b + 0.2]]))
    torch.testing.assert_close(windowed_arr(TRUTH, NEW, slots, include_new=False), torch.tensor([[a / 0.9, b / 0.8]]))


def test_arr_of_the_oracle_per_layer_by_hand():
    slots = oracle_set(TRUTH, LENGTHS, 3, per_layer=True)
    assert slots.tolist() == [[[0, 2, 6], [0, 1, 3]]]
    torch.testing.assert_close(windowed_arr(TRUTH, NEW, slots), torch.tensor([[0.65 + 0.1, 0.55 + 0.2]]))


def test_everything_kept_is_one_and_unused_places_count_nothing():
    slots = history_set(HISTORY, LENGTHS, 12, 1, 1)
    assert slots.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, -1, -1, -1, -1]]
    for include_new in (True, False):
        torch.testing.assert_close(windowed_arr(TRUTH, NEW, slots, include_new), torch.ones(1, 2))


def test_windows_are_chosen_for_each_by_itself():
    truth, new = torch.rand(5, 3, 20), torch.rand(5, 3)
    lengths = torch.tensor([20, 12, 7, 3, 16])
    together = oracle_set(truth, lengths, 6)
    for i, n in enumerate(lengths.tolist()):
        alone = oracle_set(truth[i : i + 1, :, :n], lengths[i : i + 1], 6)
        assert together[i].tolist() == alone[0].tolist()
        arr = windowed_arr(truth[i : i + 1], new[i : i + 1], alone)
        torch.testing.assert_close(windowed_arr(truth, new, together)[i], arr[0])


def dense_rows(model, ids):
    """Attention of every layer over a whole sequence, `[layers, HQ, L, L]`, by the eager implementation."""
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return torch.stack(model(input_ids=torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
    finally:
        model.set_attn_implementation("sdpa")


def renormalised(rows, length):
    """Softmax over the first `length` tokens alone, from rows over more."""
    return rows[..., :length] / rows[..., :length].sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "family, q_heads, kv_heads, stride, deltas",
    [
        ("qwen2", 4, 2, None, (1,)),
        ("llama", 6, 2, 5, (1, 3)),
        ("qwen3", 4, 1, None, (1, 7)),
        ("mistral", 4, 4, 4, (2, 1)),
    ],
)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_traces_are_the_dense_computation(tmp_path, family, q_heads, kv_heads, stride, deltas, batch_size):
    target = tiny_model(family, 0, **heads(q_heads, kv_heads), num_hidden_layers=3)
    draft = tiny_model(family, 1, **heads(q_heads, kv_heads))
    target.generation_config.eos_token_id = None
    settings = TraceSettings(
        as_candidates({0: (1, 3), 2: (0,)}, {2: tuple(range(q_heads))}),
        as_candidates({0: (2,), 1: (0, 3)}),
        window=3,
        new_tokens=11,
        stride=stride,
        deltas=deltas,
        batch_size=batch_size,
    )
    prompts = random_prompts([37, 21, 50])
    found = record(target, draft, prompts, tmp_path, settings)
    assert len(found) == 3
    for i, ids in enumerate(prompts):
        sample = found.sample(i)
        text = [*ids, *plain(target, ids, new=11)]
        assert sample.tensors["tokens"].tolist() == text and sample.tensors["prompt_length"] == len(ids)
        starts = list(range(len(ids), len(text) - 2, stride or 3))
        assert sample.lengths.tolist() == starts
        rows, draft_rows = dense_rows(target, text), dense_rows(draft, text)
        for w, n in enumerate(starts):
            truth = rows[:, :, n : n + 3].mean((1, 2))
            torch.testing.assert_close(sample.truth()[w, :, :n], truth[:, :n], atol=2e-7, rtol=1e-3)
            assert not sample.truth()[w, :, n:].any()
            torch.testing.assert_close(sample.new_mass[w], truth[:, n : n + 3].sum(-1), atol=1e-5, rtol=1e-4)
            for delta in deltas:
                for c, (layer, chosen) in enumerate(settings.target):
                    # an earlier query has seen no later token: its row is causal
                    expected = renormalised(rows[layer, list(chosen), n - delta], n).sum(0)
                    got = sample.history([c], delta)[w, :n]
                    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-3)
            for c, (layer, chosen) in enumerate(settings.draft):
                expected = renormalised(draft_rows[layer, list(chosen), n : n + 3], n).sum((0, 1))
                torch.testing.assert_close(sample.lookahead([c])[w, :n], expected, atol=1e-6, rtol=1e-3)
        both = sample.history([0]) + sample.history([1])
        torch.testing.assert_close(sample.history([0, 1]), both)


def small(new_tokens=9, **options):
    return TraceSettings(as_candidates({1: (0, 1)}), as_candidates({0: (2,)}), 3, new_tokens, **options)


def small_pair():
    target, draft = tiny_model(seed=0), tiny_model(seed=1)
    target.generation_config.eos_token_id = None
    return target, draft


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_rows_of_a_group_end_by_themselves(tmp_path):
    """Continuations of other lengths, some without a window; as if each were recorded alone."""
    pair, prompts = small_pair(), random_prompts([20, 30, 25, 9])
    continued = [plain(pair[0], ids, new=20) for ids in prompts]
    pair[0].generation_config.eos_token_id = [continued[0][1], continued[1][8], continued[3][0]]
    together = record(*pair, prompts, tmp_path / "together", small(20, batch_size=4))
    alone = record(*pair, prompts, tmp_path / "alone", small(20))
    windows = [len(alone.sample(i).lengths) for i in range(4)]
    assert windows[0] == windows[3] == 0 and len(set(windows)) > 1 and max(windows) > 1
    for i in range(4):
        assert together.sample(i).tensors["tokens"].tolist() == alone.sample(i).tensors["tokens"].tolist()
        for name, expected in alone.sample(i).tensors.items():
            got = together.sample(i).tensors[name]
            assert got.dtype == expected.dtype
            torch.testing.assert_close(got.float(), expected.float(), atol=2e-3, rtol=2e-3)


def test_an_interrupted_group_is_recorded_again(tmp_path):
    pair, prompts = small_pair(), random_prompts([20, 30, 25, 40, 22])
    record(*pair, prompts, tmp_path / "whole", small(batch_size=2))
    record(*pair, prompts, tmp_path / "parts", small(batch_size=2))
    (tmp_path / "parts" / TraceSet(tmp_path / "parts").names[3]).unlink()
    record(*pair, prompts, tmp_path / "parts", small(batch_size=2))
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"traces of other \['settings'\]"):
        record(*pair, prompts, tmp_path / "parts", small())


def test_a_recording_goes_on_where_it_was_interrupted(tmp_path):
    pair, prompts = small_pair(), random_prompts([20, 30, 25])
    record(*pair, prompts, tmp_path / "whole", small())

    def interrupt(phase, done, total):
        assert (phase, total) == ("traces", 3)
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(*pair, prompts, tmp_path / "parts", small(), interrupt)
    with pytest.raises(ValueError, match="lacks 1 of 3 samples.*run the recording again"):
        TraceSet(tmp_path / "parts")
    seen = []
    record(*pair, prompts, tmp_path / "parts", small(), lambda *step: seen.append(step))
    assert seen == [("traces", 2, 3), ("traces", 3, 3)]
    assert files_of(tmp_path / "parts") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    "change, what", [("prompts", "samples"), ("settings", "settings"), ("draft", "models"), ("target", "models")]
)
def test_a_folder_of_another_recording_is_refused(tmp_path, change, what):
    target, draft = small_pair()
    record(target, draft, random_prompts([20]), tmp_path, small())
    prompts, settings = random_prompts([20], seed=int(change == "prompts")), small(9 + (change == "settings"))
    pair = (draft if change == "target" else target), (target if change == "draft" else draft)
    with pytest.raises(ValueError, match=rf"holds traces of other \['{what}'\]"):
        record(*pair, prompts, tmp_path, settings)


@pytest.mark.parametrize("where", ["before", "during"])
def test_a_full_disk_is_said_in_words(tmp_path, monkeypatch, where):
    pair, prompts = small_pair(), random_prompts([20, 30])
    write, free = traces_module.Path.write_bytes, traces_module.shutil.disk_usage

    def full(path, content):
        if path.name.startswith("0001"):
            write(path, content[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patch:
        if where == "during":
            patch.setattr(traces_module.Path, "write_bytes", full)
        else:
            patch.setattr(traces_module.shutil, "disk_usage", lambda folder: free(folder)._replace(free=10))
        with pytest.raises(RuntimeError, match=r"the disk of .* is full \(.*\): these traces need 0.00 GB"):
            record(*pair, prompts, tmp_path, small())
    assert not [name for name in files_of(tmp_path) if name.endswith(".tmp")]
    assert len(files_of(tmp_path)) == (2 if where == "during" else 0)
    assert len(record(*pair, prompts, tmp_path, small())) == 2


def test_other_errors_of_the_disk_stay_what_they_are(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        record(*small_pair(), random_prompts([20]), tmp_path / "file", small())


@pytest.mark.parametrize("options", [{}, {"stride": 4}, {"deltas": (1, 5)}])
def test_the_size_is_known_before(tmp_path, options):
    pair, prompts = small_pair(), random_prompts([20, 130])
    found = record(*pair, prompts, tmp_path, small(20, **options))
    sizes = sum(x.nbytes for i in (0, 1) for name, x in found.sample(i).tensors.items() if "tok" not in name)
    estimate = size_estimate(pair[0], [20, 130], small(20, **options))
    assert sizes == estimate + 2 * 8  # prompt_length


def test_contexts_that_do_not_fit():
    target, draft = tiny_model(max_position_embeddings=64), tiny_model(max_position_embeddings=48)
    for length, message in [
        (70, "prompt 0 has 70 tokens, with 9 new ones more than the 64 positions of the target: cut it"),
        (50, "more than the 48 positions of the draft"),
        (1, "prompt 0 has 1 tokens; histories need at least 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            record(target, draft, random_prompts([length]), "nowhere", small())


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target": ()}, "at least one candidate"),
        ({"stride": 2}, "`stride` must be at least `window`"),
        ({"new_tokens": 2}, "`new_tokens` must fill a window"),
        ({"deltas": (2,)}, "`deltas` must be positive and hold 1"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        TraceSettings(**{"target": ((0, (0,)),), "draft": ((0, (0,)),), "window": 3, **options})


def test_texts_that_end_at_once_have_no_window(tmp_path):
    target, draft = small_pair()
    prompts = random_prompts([20, 24])
    first = plain(target, prompts[0], new=1)[0]
    target.generation_config.eos_token_id = [first]
    found = record(target, draft, prompts, tmp_path, small(30))
    assert found.sample(0).truth().shape == (0, 2, 0) and found.sample(0).tensors["tokens"][-1] == first
    assert Objective(found, [0, 1], 1, 1).numbers == [1]
    with pytest.raises(ValueError, match="no sample has a window"):
        Objective(found, [0], 1, 1)


def test_tables_are_the_policies_over_windows_and_texts(tmp_path):
    found = record(*small_pair(), random_prompts([40, 50]), tmp_path, small(12, deltas=(1, 4)))
    table = policy_tables(Objective(found, [0, 1], 2, 3), [0], [0], {12: 5}, (0, 0, 0.75))["12"]
    for name, choose in {
        "hybrid": lambda s: hybrid_set(s.history([0]), s.lookahead([0]), s.lengths, 12, 5, 2, 3),
        "history": lambda s: history_set(s.history([0]), s.lengths, 12, 2, 3),
        "lookahead": lambda s: lookahead_set(s.lookahead([0]), s.lengths, 12, 2, 3),
        "streaming": lambda s: streaming_set(s.lengths, 12, 2),
        "default": lambda s: hybrid_set(s.history([0]), s.lookahead([0]), s.lengths, 12, 9, 2, 3),
        "history_4": lambda s: history_set(s.history([0], 4), s.lengths, 12, 2, 3),
        "oracle": lambda s: oracle_set(s.truth(), s.lengths, 12),
        "oracle_per_layer": lambda s: oracle_set(s.truth(), s.lengths, 12, per_layer=True),
    }.items():
        for key, new in (("arr", True), ("arr_committed", False)):
            rates = [windowed_arr(s.truth(), s.new_mass, choose(s), new) for s in map(found.sample, (0, 1))]
            assert table[name][key] == pytest.approx(sum(float(x.mean()) for x in rates) / 2, abs=1e-5)
    assert len(table["hybrid"]["arr_per_layer"]) == 2
    others = [row["arr"] for name, row in table.items() if name not in ("oracle", "oracle_per_layer")]
    assert table["oracle_per_layer"]["arr"] >= table["oracle"]["arr"] >= max(others)


def test_candidates_are_named_once():
    assert as_candidates({2: (1,), 0: [3, 0]}, {2: (1,), 1: (0,)}) == ((0, (3, 0)), (2, (1,)), (1, (0,)))
    assert SCALE * 1.0 < torch.finfo(torch.float16).max


def test_texts_of_the_data_set(monkeypatch):
    rows = [{"context": "long", "query": "what?"}, {"messages": [{"role": "user", "content": "hi"}]}]
    asked = []
    library = SimpleNamespace(load_dataset=lambda *args, **kwargs: asked.append((args, kwargs)) or rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert list(validation_texts(limit=2).values()) == ["long\n\nwhat?", "hi"]
    assert asked == [(("zai-org/LongReward-10k",), {"split": "sft[:2]"})]
    rows[0] = {"idx": 3}
    with pytest.raises(ValueError, match=r"has no text, its fields are \['idx'\]"):
        validation_texts()

    def out_of_reach(*args, **kwargs):
        raise ConnectionError("Couldn't reach it")

    library.load_dataset = out_of_reach
    for load in (validation_texts, load_books):
        with pytest.raises(FileNotFoundError, match=r"cannot be fetched from the Hub .*: pass texts of your own"):
            load()


def test_progress_bars(capsys):
    bars = ProgressBars()
    for step in [("traces", 0, 2), ("traces", 2, 2), ("search", 1, 3)]:
        bars(*step)
    bars.bar.close()
    shown = capsys.readouterr().err
    assert "traces" in shown and "2/2" in shown and "1/3" in shown
