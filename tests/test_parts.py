"""Long measurements that are cut off: what is done stays, the same command goes on, another one is refused."""

import json

import pytest
import torch
from helpers import Counted
from test_bench import DRAFT, TARGET, cpu_as_gpu  # noqa: F401

from dustin_hf.eval.efficiency import kernels, overhead, real
from dustin_hf.eval.fidelity import measure
from dustin_hf.eval.parts import Parts
from dustin_hf.eval.run_folder import SAME, RunFolder
from dustin_hf.testing import noisy_copy, random_prompts, tiny_model


def cut_off_once(monkeypatch, module, name, end, run):
    """What `run` gives the second time, after the first ended at a call of the module's function."""
    function = getattr(module, name)
    monkeypatch.setattr(module, name, Counted(function, end))
    with pytest.raises(KeyboardInterrupt):
        run()
    monkeypatch.setattr(module, name, Counted(function))
    found = run()
    assert getattr(module, name).calls == 1
    return found


def test_parts_are_made_once(tmp_path):
    out, made = tmp_path / "x.json", Counted(lambda: {"a": (1, 2), "b": 0.1 + 0.2, "c": float("nan")})
    for _ in range(2):  # two runs
        parts = Parts(out, False, "bench --out x.json")
        parts.begin([1, 2])
        for _ in range(2):
            found = parts.of("first", made)
            assert found["a"] == [1, 2] and found["b"] == 0.1 + 0.2 and found["c"] != found["c"]
    assert made.calls == 1 and (tmp_path / "x.json.parts").is_dir()
    # a line that was torn is made again
    with (tmp_path / "x.json.parts" / "parts.jsonl").open("ab") as file:
        file.write(b'{"id": "second", "fou')
    parts = Parts(out, False, "bench --out x.json")
    parts.begin([1, 2])
    assert parts.of("second", lambda: 5) == 5 and parts.of("first", made)["a"] == [1, 2] and made.calls == 1
    parts.save({"all": 1})
    assert json.loads(out.read_text()) == {"all": 1} and list(tmp_path.iterdir()) == [out]


def test_parts_of_another_run(tmp_path):
    out = tmp_path / "x.json"
    first = Parts(out, False, "bench --gamma 3")
    first.begin("text")
    first.of("a", lambda: 1)
    for command, inputs, what in (("bench --gamma 4", "text", "command"), ("bench --gamma 3", "other", "inputs")):
        with pytest.raises(ValueError, match=f"x.json.parts holds a run with other .'{what}'.*remove it"):
            Parts(out, False, command).begin(inputs)
    forced = Parts(out, True, "bench --gamma 3 --force")
    forced.begin("text")  # of the same one, but for the option
    assert forced.of("a", lambda: 2) == 1
    forced = Parts(out, True, "bench --gamma 4 --force")
    forced.begin("text")
    assert forced.of("a", lambda: 2) == 2
    out.write_text("{}")
    with pytest.raises(ValueError, match="exists: choose another name, or pass --force"):
        Parts(out, False, "bench")
    with_no_file = Parts()
    with_no_file.begin("text")
    assert with_no_file.of("a", lambda: 3) == 3
    with_no_file.save({})


def test_a_replay_goes_on(tmp_path, monkeypatch):
    target = tiny_model("qwen2", eos_token_id=None)
    draft, contexts, told = noisy_copy(target, 0.05), random_prompts([40, 33, 51]), []

    def run(**options):
        return measure.fidelity(target, draft, contexts, budgets=[24], new_tokens=8, **options)

    def again():
        parts = Parts(tmp_path / "x.json", False, "fidelity")
        return run(parts=parts, progress=lambda *what: told.append(what))

    whole = run()
    assert cut_off_once(monkeypatch, measure, "replay", 3, again) == whole and told[-1] == ("fidelity", 6, 6)


def test_a_decode_bench_goes_on(tmp_path, monkeypatch):
    target = tiny_model("qwen2")
    draft = noisy_copy(target, 0.02)
    texts = {"a": torch.randint(3, 160, (400,), generator=torch.Generator().manual_seed(0)).tolist()}

    def run():
        parts = Parts(tmp_path / "x.json", False, "bench decode")
        arms = ("vanilla", "dustin")
        return real.run_real(target, draft, texts, (48, 64), (2,), 3, 32, arms, 16, "bench decode", parts=parts)

    found = cut_off_once(monkeypatch, real, "_measure", 2, run)
    assert [row["context"] for row in found["rows"]] == [48, 48, 64, 64]
    assert all(row["over_vanilla"] > 0 and row["new_tokens"] == [16, 16] for row in found["rows"])


@pytest.mark.parametrize("bench", [kernels, overhead])
def test_kernel_benches_go_on(cpu_as_gpu, bench, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(overhead, "check_cuda", lambda: None)
    monkeypatch.setattr(overhead, "copy_rate", lambda: 4000.0)
    monkeypatch.setattr(overhead._Estimators, "_time", lambda self, call: (call(0), 2.0)[1])

    def run():
        parts = Parts(tmp_path / "x.json", False, "bench")
        if bench is kernels:
            return kernels.run_kernels([(TARGET, DRAFT)], (96, 160), (2,), 3, 32, "bench", None, parts)
        return overhead.run_overhead(TARGET, DRAFT, (96, 160), 2, 3, 32, "bench", None, parts)

    found = cut_off_once(monkeypatch, bench, "_measured", 2, run)
    assert list(dict.fromkeys(row["context"] for row in found["rows"])) == [96, 160]


def test_folders_of_something_else_are_left_alone(tmp_path):
    (tmp_path / "notes.jsonl").write_text("mine, without an end")
    with pytest.raises(ValueError, match="holds files of something else: use another folder"):
        RunFolder(tmp_path, {"a": 1})
    assert (tmp_path / "notes.jsonl").read_text() == "mine, without an end"
    (tmp_path / "notes.jsonl").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "mine"}')
    with pytest.raises(ValueError, match="holds files of something else: use another folder"):
        RunFolder(tmp_path, {"a": 1})
    assert (tmp_path / "config.json").read_text() == '{"model_type": "mine"}'


def test_where_a_run_goes_on_is_kept(tmp_path, monkeypatch):
    held = []

    def go_on(commit, n):
        monkeypatch.setattr("dustin_hf.eval.run_folder.conditions", lambda command: {**dict.fromkeys(SAME), **commit})
        folder = RunFolder(tmp_path / "run", {"a": 1})
        for _ in range(2):
            folder.begin("x")
        before = (tmp_path / "run" / "config.json").read_text()
        if n:  # what adds nothing is no part of the run
            assert before == json.dumps(held[-1], indent=1) + "\n"
        folder.add("task", [{"id": str(n)}])
        held.append(json.loads((tmp_path / "run" / "config.json").read_text()))
        return held[-1]

    one, two = {"commit": "one", "gpu": "A"}, {"commit": "two", "gpu": "A"}
    for i in range(2):
        config = go_on(one, i)
        assert config["conditions"]["commit"] == "one" and "continued" not in config
    for i in range(2, 4):
        config = go_on(two, i)
        assert config["conditions"]["commit"] == "one"
        assert [each["commit"] for each in config["continued"]] == ["two"]
    assert [each["commit"] for each in go_on(one, 5)["continued"]] == ["two", "one"]
