"""The bench: shapes against published sizes, records, tables, errors; and all of it on tiny shapes."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from dustin_hf import cli, tables
from dustin_hf.eval.efficiency import inputs, kernels, point_bench, record, timing
from dustin_hf.eval.efficiency.shapes import DRAFTS, SHAPES, Shape, pair_of

# As the model cards and files on the Hub give them.
PARAMETERS = {
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
}
TARGET = Shape("tiny", 3, 128, 128, 8, 2, 16, 160, False, "qwen2")
DRAFT = Shape("tinier", 2, 48, 64, 3, 1, 16, 160, True, "llama")
OPS = {
    ("full_attention", "tiny", 1),
    ("full_attention", "tiny", 4),
    ("full_attention", "tinier", 1),
    ("sparse_attention", "tiny", 4),
    ("sparse_attention", "tinier", 1),
    ("sdpa_unpacked", "tiny", 1),
    ("sdpa_unpacked", "tiny", 4),
    ("sdpa_packed", "tiny", 1),
    ("sdpa_packed", "tiny", 4),
    ("kv_append", "tiny", 4),
    ("topk_select", "tiny", 0),
    ("torch.topk", "tiny", 0),
    ("srh_score", "tiny", 1),
    ("srh_score", "tinier", 3),
    ("select", "tiny", 3),
    ("srh_score_grouped", "tiny", 1),
    ("srh_score_grouped", "tinier", 3),
    ("select_grouped", "tiny", 3),
}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_all_shapes_are_known():
    assert set(SHAPES) == set(PARAMETERS) == {shape.name for shape in SHAPES.values()}
    for target, draft in DRAFTS.items():
        assert SHAPES[target].layers >= SHAPES[draft].layers and SHAPES[target].family == SHAPES[draft].family
    assert pair_of("llama-3.1-8b") == (SHAPES["llama-3.1-8b"], SHAPES["llama-3.2-1b"])


@pytest.mark.parametrize("name", PARAMETERS)
def test_shape_is_the_published_one(name):
    from transformers import AutoModelForCausalLM

    shape = SHAPES[name]
    config = shape.config(max_position_embeddings=40_000)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(p.numel() for p in model.parameters())
    assert parameters == PARAMETERS[name]
    table = 0 if shape.tied else model.get_input_embeddings().weight.numel()
    assert shape.weight_bytes() == 2 * (parameters - table) and shape.weight_bytes(4) == 2 * shape.weight_bytes()
    keys = model.model.layers[0].self_attn.k_proj.out_features
    assert shape.kv_bytes_per_token() == 2 * 2 * keys * len(model.model.layers)
    assert config.max_position_embeddings == 40_000 and config.eos_token_id is None


def test_kv_bytes():
    """As in shared numbers: Qwen2.5-7B holds 56 KiB a token in 16 bits, Llama-3.1-8B 128 KiB."""
    assert SHAPES["qwen2.5-7b"].kv_bytes_per_token() == 56 * 1024
    assert SHAPES["llama-3.1-8b"].kv_bytes_per_token() == 128 * 1024
    assert SHAPES["llama-3.1-8b"].kv_bytes_per_token(1) == 64 * 1024


@pytest.mark.parametrize("wrong", [{"kv_heads": 3}, {"head_dim": 32}, {"family": "gpt2"}])
def test_impossible_shapes(wrong):
    fields = {name: getattr(TARGET, name) for name in Shape.__slots__}
    with pytest.raises(ValueError, match="must be"):
        Shape(**{**fields, **wrong})


def test_save_never_overwrites_silently(tmp_path):
    path = tmp_path / "new" / "result.json"
    record.check_free(path)
    record.save(path, {"a": 1.5})
    assert json.loads(path.read_text()) == {"a": 1.5} and path.read_text().count("\n") == 3
    with pytest.raises(ValueError, match="--out .*exists.*--force"):
        record.save(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1.5}
    record.save(path, {"a": 2}, force=True)
    assert json.loads(path.read_text()) == {"a": 2}
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]
    with pytest.raises(ValueError, match="new is a folder: name a file"):
        record.check_free(path.parent, force=True)
    with pytest.raises(ValueError, match="x.json cannot be made: .*result.json is a file"):
        record.check_free(path / "deeper" / "x.json")


def test_save_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    record.save(path, {"a": 1})
    for payload, error in (({"a": float("nan")}, ValueError), ({"a": object()}, TypeError)):
        with pytest.raises(error):
            record.save(path, payload, force=True)

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        record.save(path, {"a": 2}, force=True)
    assert json.loads(path.read_text()) == {"a": 1} and [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_conditions_hold_no_paths_and_no_host():
    found = record.conditions("/home/me/bin/dustin-hf bench --out=/tmp/a.json --out /tmp/b.json ~/c relative/d 'x y'")
    assert found["command"] == "dustin-hf bench --out=a.json --out b.json c relative/d 'x y'"
    text = json.dumps(found)
    assert not re.search(r"(?<![\w.])/\w", text) and os.uname().nodename not in text
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])
    assert found["torch"] == torch.__version__ and found["transformers"] and found["python"]
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}", found["commit"])
    assert (found["dirty"] is None) == (found["commit"] is None)
    assert (found["gpu"] is None) == (not torch.cuda.is_available())


def test_conditions_without_tools(monkeypatch):
    def absent(*args, **kwargs):
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", absent)
    found = record.conditions("x")
    assert found["driver"] is found["commit"] is found["dirty"] is None


def test_table(monkeypatch, capsys):
    columns, rows = ("op", "us"), [("attention [B]", "1.5"), ("a", "120.0")]
    text = tables.aligned("title", columns, rows)
    lines = text.splitlines()
    assert lines[0] == "title" and [len(line) for line in lines[1:]] == [20] * 4
    assert lines[3].endswith("  1.5") and lines[4].startswith("a  ") and lines[4].endswith("120.0")
    tables.show("title", columns, rows)
    assert "attention [B]" in capsys.readouterr().out
    wide = [f"column {i}" for i in range(40)]  # read from a file, no column is cut, whatever the environment says
    monkeypatch.setenv("COLUMNS", "80")
    tables.show("title", wide, [wide])
    assert capsys.readouterr().out.count("column 39") == 2
    monkeypatch.setattr(tables, "find_spec", lambda name: None)
    tables.show("title", columns, rows)
    assert capsys.readouterr().out == text + "\n\n"


def test_bench_needs_neither_typer_nor_rich():
    code = (
        "import sys; sys.modules['typer'] = sys.modules['rich'] = None\n"
        "import dustin_hf.cli, dustin_hf.eval.efficiency.cli, dustin_hf.eval.efficiency.kernels as k\n"
        "assert 'triton' not in sys.modules and callable(k.run_kernels)\n"
        "sys.argv = ['dustin-hf', 'bench', 'kernels']; dustin_hf.cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "dustin-hf needs typer: pip install 'dustin_hf[bench]'\n"


def test_prefill_command(tmp_path):
    for arguments, message in (
        (["--shape", "gpt2"], "--shape must be one of"),
        ([], "no CUDA device was found"),
    ):
        result = CliRunner().invoke(cli.app(), ["bench", "prefill", *arguments])
        assert result.exit_code == 1 and message in result.output


def test_help_and_errors_of_the_command(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    result = CliRunner().invoke(cli.app(), ["bench", "kernels", "--help"])
    assert result.exit_code == 0
    for option in ("--shape", "--context", "--batch", "--gamma", "--budget", "--out", "--force"):
        assert option in result.output
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    for arguments, message in (
        (["--out", str(taken)], "exists: choose another name"),
        (["--shape", "gpt2"], "--shape must be one of qwen2.5-1.5b"),
        (["--shape", "qwen2.5-0.5b"], "--shape must be one of"),
    ):
        result = CliRunner().invoke(cli.app(), ["bench", "kernels", *arguments])
        assert result.exit_code == 1 and "error: " in result.output and message in result.output


@no_gpu
def test_without_a_cuda_device():
    result = CliRunner().invoke(cli.app(), ["bench", "kernels"])
    assert result.exit_code == 1
    assert result.output == "error: `dustin-hf bench` measures CUDA kernels; no CUDA device was found\n"
    for measure in (timing.copy_rate, lambda: timing.time_graph(lambda i: None, 1), kernels.run_kernels):
        with pytest.raises(ValueError, match="no CUDA device was found"):
            measure()


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on CUDA."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Everything of the bench but the timing itself, on the CPU: each call runs over all of its input sets."""

    def timed(run, rotations):
        for i in range(rotations):
            run(i)
        return timing.Timing(2.0, 1.0, 3.0)

    monkeypatch.setattr(point_bench, "time_graph", timed)
    monkeypatch.setattr(kernels, "copy_rate", lambda: 4000.0)
    monkeypatch.setattr(kernels, "check_cuda", lambda: None)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(inputs, "COLD_BYTES", 500_000)
    properties = type("Properties", (), {"L2_cache_size": 100_000})
    for name, answer in {
        "synchronize": None,
        "empty_cache": None,
        "current_device": 0,
        "mem_get_info": (10**8, 10**8),
        "get_device_properties": properties,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, answer=answer: answer)
    with OnCpu():
        yield


def check(result):
    json.dumps(result, allow_nan=False)
    assert len(result["steps"]) == len(result["errors"]) == 2
    for context in (96, 160):
        rows = [row for row in result["rows"] if row["context"] == context]
        skipped = {(s["what"], "tiny", s["q"]) for s in result["skipped"]}
        assert {(row["what"], row["model"], row["q"]) for row in rows} | skipped == OPS
    for row in result["rows"]:
        assert 0 < row["low_us"] <= row["us"] <= row["high_us"] and row["bytes"] > 0
        assert row["share"] == pytest.approx(row["bytes"] / result["copy_rate_gb_s"] / 1e3 / row["us"])
    assert max(max(v for v in e.values() if isinstance(v, float)) for e in result["errors"]) < 0.02


def test_whole_bench_on_the_cpu(cpu_as_gpu, capsys):
    told = []
    result = kernels.run_kernels([(TARGET, DRAFT)], (96, 160), (2,), 3, 32, "x", told.append)
    check(result)
    assert told == [f"tiny with tinier, context {context}, batch 2" for context in (96, 160)]
    step = result["steps"][1]
    assert (step["sparse_us"], step["select_us"], step["packed_ours_us"]) == (6.0, 2.0, 6.0)
    assert step["times_packed_ours"] == step["times_packed_best"] == 0.75 and step["select_share"] == 2 / 6
    bytes_of = {(row["what"], row["model"], row["q"]): row["bytes"] for row in result["rows"] if row["context"] == 160}
    assert bytes_of["full_attention", "tiny", 4] == bytes_of["sdpa_packed", "tiny", 4] == 2 * 2 * 2 * 2 * 160 * 16
    assert bytes_of["sparse_attention", "tiny", 4] == 2 * 2 * 2 * 2 * (32 + 4) * 16
    assert bytes_of["srh_score", "tiny", 1] == 2 * bytes_of["srh_score_grouped", "tiny", 1] == 2 * 2 * 2 * 160 * 16
    kernels.report(result)
    printed = capsys.readouterr().out
    for word in (
        "sparse_attention",
        "sdpa_packed",
        "select_grouped",
        "self-attention of a step",
        "copy rate 4000 GB/s",
    ):
        assert word in printed


def test_a_wrong_kernel_is_not_measured(cpu_as_gpu, monkeypatch):
    from dustin_hf.eval.efficiency import checks

    monkeypatch.setattr(checks, "full_attention", lambda q, *rest: (torch.zeros_like(q), None))
    with pytest.raises(ValueError, match="full_attention differs from its plain twin by 1"):
        kernels.run_kernels([(TARGET, DRAFT)], (96,), (2,), 3, 32)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": 19}, "--budget must be 20 .* to 92"),
        ({"budget": 93}, "--budget must be 20 .* to 92"),
        ({"gamma": 0}, "--gamma, --context and --batch must be at least 1"),
        ({"batches": (40_000,)}, "--context 96 with --batch 40000 needs .* GB are free"),
    ],
)
def test_impossible_points(cpu_as_gpu, options, message):
    options = {"contexts": (96,), "batches": (2,), "gamma": 3, "budget": 32, **options}
    with pytest.raises(ValueError, match=message):
        kernels.run_kernels([(TARGET, DRAFT)], **options)


def test_a_step_without_baselines():
    rows = [
        {"what": what, "backend": None, "model": "tiny", "q": q, "us": us}
        for what, q, us in (("sparse_attention", 4, 5.0), ("full_attention", 4, 400.0), ("select", 3, 15.0))
    ]
    rows.append({**rows[2], "what": "select_grouped", "us": 12.0})
    step = kernels.step_line(rows, TARGET, 3)
    assert step["step_us"] == 30.0 and step["times_packed_best"] == 40.0
    assert step["packed_sdpa_us"] is step["times_packed_sdpa"] is step["times_unpacked_flash"] is None
    assert step["packed_sdpa_backend"] is None and step["select_grouped_share"] == 0.01


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu():
    result = kernels.run_kernels([(TARGET, DRAFT)], (96, 160), (2,), 3, 32, "x")
    check(result)
    assert result["copy_rate_gb_s"] > 10 and result["conditions"]["gpu"] and result["conditions"]["driver"]
    assert all(step["times_packed_ours"] > 0 for step in result["steps"])


@pytest.mark.gpu
@on_gpu
def test_time_grows_with_the_work():
    x = torch.randn(64, 1024, 1024, device="cuda")
    one, all_ = (timing.time_graph(lambda i, n=n: x[:n].mul_(1.0), 1) for n in (1, 64))
    assert 0 < one.low_us <= one.median_us <= one.high_us and all_.median_us > 4 * one.median_us


def test_estimators_are_counted_as_often_as_there_are_layers(monkeypatch):
    from dustin_hf.eval.efficiency import overhead

    target, draft = SHAPES["qwen2.5-72b"], SHAPES["qwen2.5-0.5b"]
    point = SimpleNamespace(target=SimpleNamespace(shape=target), draft=SimpleNamespace(shape=draft), gamma=4)
    times = overhead._Estimators(point)
    monkeypatch.setattr(times, "_select", lambda: 1000.0)
    monkeypatch.setattr(times, "_quest", lambda: 2.0)
    monkeypatch.setattr(times, "_score", lambda layer, heads, queries: (heads or 4) * queries / 100)
    expected = {
        "target": 1000 + 0.04,
        "draft": 1000 + 3 * 0.16,
        "hybrid": 1000 + 0.04 + 3 * 0.16,
        "quest-16": 78 * 2.0,
        "naive": 1000 + 80 * 0.64 + 24 * 0.56,
    }
    assert {name: times.of(name) for name in overhead.ESTIMATORS} == pytest.approx(expected)


@pytest.mark.gpu
@on_gpu
def test_overhead_on_a_gpu():
    from dustin_hf.eval.efficiency.overhead import ESTIMATORS, run_overhead

    result = run_overhead(SHAPES["qwen2.5-7b"], SHAPES["qwen2.5-0.5b"], (4096,), 2)
    assert [row["estimator"] for row in result["rows"]] == list(ESTIMATORS)
    assert all(row["us"] > 0 and row["share"] == row["us"] / row["attention_us"] for row in result["rows"])
    json.dumps(result, allow_nan=False)
