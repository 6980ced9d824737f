"""`bench decode`: its options, prompts from texts, shares of old n-grams, and real runs of tiny models."""

import gzip
import importlib
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import dustin_hf
from dustin_hf import DustinCache, cli
from dustin_hf.acceptance import greedy_accept
from dustin_hf.eval.baselines import SpecAttnPolicy, registered_baselines
from dustin_hf.eval.efficiency import decode, real, real_arms, texts
from dustin_hf.eval.efficiency.arms import ARMS, build
from dustin_hf.eval.efficiency.shapes import SHAPES, Shape
from dustin_hf.model_patches.attention import block_attention
from dustin_hf.pool import Pool
from dustin_hf.prefill import held_prefixes, prefill
from dustin_hf.profile import DustinProfile
from dustin_hf.selection import FullPolicy, HybridPolicy
from dustin_hf.stats import Clock
from dustin_hf.step import REPORT, speculative_step
from dustin_hf.testing import noisy_copy, random_prompts, tiny_model

SOURCES = {"book": range(1000, 1410), "code": range(5000, 5300), "tiny": range(9000, 9040)}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def test_help_and_errors_of_decode(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    result = CliRunner().invoke(cli.app(), ["bench", "decode", "--help"])
    assert result.exit_code == 0
    options = "shape target draft context batch gamma budget arms tau ragged texts new-tokens out force"
    for option in options.split():
        assert f"--{option}" in result.output
    taken = tmp_path / "taken.json"
    taken.write_text("{}")
    pair = ["--target", "a", "--draft", "b"]
    for arguments, message in (
        ([], "give either --shape, or --target with --draft"),
        (["--shape", "qwen2.5-7b", *pair], "give either --shape, or --target with --draft"),
        (["--target", "a"], "--target and --draft must be given together"),
        (["--draft", "b"], "--target and --draft must be given together"),
        ([*pair, "--tau", "2.2"], "--tau goes with --shape only"),
        (["--shape", "qwen2.5-7b", "--texts", "."], "--texts goes with --target only"),
        (["--shape", "qwen2.5-7b", "--new-tokens", "9"], "--new-tokens goes with --target only"),
        (["--shape", "qwen2.5-7b", "--arms", "dustin,nothing"], "--arms must be of hf, hf-static, vanilla"),
        ([*pair, "--arms", "hf-static"], "--arms must be of hf, vanilla"),
        (["--shape", "qwen2.5-7b", "--out", str(taken)], "exists: choose another name"),
        (["--shape", "qwen2.5-0.5b"], "--shape must be one of qwen2.5-1.5b"),
    ):
        result = CliRunner().invoke(cli.app(), ["bench", "decode", *arguments])
        assert result.exit_code == 1 and "error: " in result.output and message in result.output


TWICE = "--context 9 --context 7 --context 9 --batch 2 --batch 2"


@pytest.mark.parametrize(
    "measure, arguments, measured",
    [
        (
            "decode.run_decode",
            f"decode --shape qwen2.5-7b {TWICE} --tau 2 --tau 2 --arms vanilla,dustin,vanilla",
            ([9, 7], [2], 3, 512, ["vanilla", "dustin"], [2.0]),
        ),
        (
            "kernels.run_kernels",
            f"kernels --shape qwen2.5-7b --shape qwen2.5-7b {TWICE}",
            (["qwen2.5-7b"], [9, 7], [2], 4, 512),
        ),
        ("overhead.run_overhead", "overhead --context 9 --context 9", ([9], 8, 4, 512)),
    ],
)
def test_what_is_asked_for_twice_is_measured_once(measure, arguments, measured, monkeypatch):
    module, name = measure.split(".")
    module = importlib.import_module(f"dustin_hf.eval.efficiency.{module}")
    calls = []
    monkeypatch.setattr(module, name, lambda *args: calls.append(args) or {})
    monkeypatch.setattr(module, "report", lambda result: None)
    result = CliRunner().invoke(cli.app(), ["bench", *arguments.split()])
    assert result.exit_code == 0, result.output
    (args,) = calls
    first = [isinstance(arg, list) for arg in args].index(True)  # behind the shapes
    assert args[first : first + len(measured)] == measured


@no_gpu
@pytest.mark.parametrize("arguments", [["--shape", "qwen2.5-7b"], ["--target", "a", "--draft", "b"]])
def test_decode_needs_a_cuda_device(arguments):
    result = CliRunner().invoke(cli.app(), ["bench", "decode", *arguments])
    assert result.exit_code == 1 and "no CUDA device was found" in result.output


def characters(texts, add_special_tokens, verbose):
    """Stands for a tokenizer: one token for each character."""
    assert not add_special_tokens
    return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


def test_texts_are_read_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("plain")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("pack\u00e9d".encode()))
    (tmp_path / "c.json").write_text("{}")
    found = texts.read_texts(tmp_path, characters)
    assert list(found) == ["a.txt.gz", "b.txt"]
    assert "".join(map(chr, found["a.txt.gz"])) == "pack\u00e9d" and "".join(map(chr, found["b.txt"])) == "plain"
    with pytest.raises(FileNotFoundError, match="--texts .* holds no .txt or .txt.gz files"):
        texts.read_texts(tmp_path / "nothing", characters)
    assert len(texts.read_texts(texts.EXCERPTS, characters)) == 4


@pytest.mark.parametrize("context, batch", [(50, 14), (50, 3), (100, 7), (41, 4), (300, 2), (7, 1)])
def test_prompts_do_not_overlap(context, batch):
    prompts = texts.cut_prompts(SOURCES, [context] * batch)
    assert [len(prompt.tokens) for prompt in prompts] == [context] * batch
    used = [token for prompt in prompts for token in prompt.tokens]
    assert len(set(used)) == len(used)
    if batch > 1:
        assert {prompt.source for prompt in prompts} >= {"book", "code"}
    for prompt in prompts:
        whole = list(SOURCES[prompt.source])
        assert prompt.tokens == whole[prompt.start : prompt.start + context]
    assert prompts == texts.cut_prompts(SOURCES, [context] * batch)


def test_prompts_take_turns_and_are_spread():
    prompts = texts.cut_prompts(SOURCES, [100, 50, 70])
    assert [(prompt.source, prompt.start, len(prompt.tokens)) for prompt in prompts] == [
        ("book", 70, 100),  # 410 tokens: two windows of 100, three gaps of 70
        ("code", 100, 50),
        ("book", 240, 70),
    ]


@pytest.mark.parametrize("context, batch", [(50, 15), (411, 1), (100, 8)])
def test_too_little_text(context, batch):
    with pytest.raises(ValueError, match=f"{batch} prompts of {context} tokens are needed, the texts hold"):
        texts.cut_prompts(SOURCES, [context] * batch)


def test_row_lengths():
    assert texts.row_lengths(9, 2, False) == [9, 9]
    assert texts.row_lengths(100, 5, True) == [50, 63, 75, 88, 100]
    assert texts.row_lengths(100, 1, True) == [100]


@pytest.mark.parametrize(
    "new, copied, repeated",
    [
        (range(100, 120), 0, 0),
        (range(10, 30), 1, 0),
        ([*range(22, 30), *range(100, 108)], 1 / 9, 0),  # the prompt ends with 29: what spans its end is not in it
        ([*range(100, 110), *range(100, 110)], 0, 3 / 13),
        ([7] * 20, 0, 12 / 13),
        ([1, 2] * 8, 0, 7 / 9),
        ([*range(10, 18), *range(10, 18)], 2 / 9, 1 / 9),
        (range(23, 31), 0, 0),
    ],
)
def test_old_shares(new, copied, repeated):
    assert texts.old_shares(range(30), list(new)) == pytest.approx((copied, repeated))


def test_old_shares_of_too_few_tokens():
    assert texts.old_shares([1, 2], range(8)) == (0, 0)
    with pytest.raises(ValueError, match="need at least 8 new tokens, got 7"):
        texts.old_shares(range(30), range(7))


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of_a_config(name):
    assert real.shape_of(SHAPES[name].config()) == SHAPES[name]


def test_shape_of_an_unknown_config():
    small = Shape("llama", 2, 48, 64, 3, 1, 16, 160, True, "llama")
    assert real.shape_of(small.config()) == small
    with pytest.raises(ValueError, match="must be a multiple"):
        real.shape_of(tiny_model("qwen3", head_dim=8).config)


def test_figures():
    run = real_arms.Run(
        seconds=2.0,
        prefill_s=0.5,
        stamps=[10.0, 10.5, 11.5, 12.0],
        committed=[[3, 4, 2], [3, 1, 1, 4]],
        rows=[list(range(100, 109)), [5] * 9],
        phases={"draft": 1.0},
        more={"backend": "graph"},
    )
    found = real.figures(run, [list(range(20)), list(range(20))])
    assert found["tokens_per_s"] == 9.0 and found["step_ms"] == 500.0 and found["steps"] == 4
    assert found["steady_tokens_per_s"] == (4 + 2 + 1 + 1) / 1.5 and found["steady_step_ms"] == 750.0
    assert found["tau"] == 18 / 7 and found["tau_per_row"] == [3.0, 2.25] and found["backend"] == "graph"
    assert found["tau_fresh"] == 3.0 and found["fresh_rows"] == 1 and found["repeated_per_row"] == [0.0, 0.5]
    # stock's first steps allocate, and count in none of its figures
    assert real.figures(replace(run, more={"steady_step_ms": 5.0}), [[1], [1]])["steady_step_ms"] == 5.0
    old = real.figures(real_arms.Run(1.0, 0.1, [1.0], [[9]], [[5] * 9], {}, {}), [[1]])
    assert old["tau_fresh"] is old["steady_tokens_per_s"] is None and old["fresh_rows"] == 0


DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])]


@pytest.fixture(params=DEVICES)
def real_pair(request):
    """A pair that agrees in part, and tokens in place of texts."""
    target = tiny_model("qwen2", hidden_size=128, eos_token_id=list(range(2, 100)))  # end ids that would end rows soon
    draft = noisy_copy(target, 0.02)
    generator = torch.Generator().manual_seed(0)
    sources = {
        name: torch.randint(3, 160, (length,), generator=generator).tolist()
        for name, length in (("a", 500), ("b", 400))
    }
    dtype = torch.bfloat16 if request.param == "cuda" else torch.float32
    return target.to(request.param, dtype), draft.to(request.param, dtype), sources


@pytest.mark.parametrize("ragged", [False, True])
def test_real_run(real_pair, ragged, capsys):
    target, draft, sources = real_pair
    own, told = target.generation_config, []
    result = real.run_real(
        target, draft, sources, (64, 96), (3,), 3, 32, real.REAL_ARMS, 24, "x", progress=told.append, ragged=ragged
    )
    json.dumps(result, allow_nan=False)
    assert target.generation_config is own and type(target).generate.__qualname__.startswith("GenerationMixin")
    assert [(row["context"], row["arm"]) for row in result["rows"]] == [
        (context, arm) for context in (64, 96) for arm in real.REAL_ARMS
    ]
    assert told[:2] == ["3 x 64: prefill", "3 x 64: vanilla"] and len(told) == 2 * (1 + len(real.REAL_ARMS))
    on_cuda = target.device.type == "cuda"
    for row in result["rows"]:
        new = real.HF_TOKENS if row["arm"] == "hf" else 24
        assert row["new_tokens"] == [new] * 3 and 1 <= row["tau"] <= 4
        assert row["decode_s"] > 0 and row["prefill_s"] > 0 and row["steady_tokens_per_s"] > 0
        assert row["over_vanilla"] == row["tokens_per_s"] / of(result, row, "vanilla")["tokens_per_s"]
        assert {f"{kind}{base}" for kind in ("over_", "steady_over_") for base in real.BASES} <= set(row)
        assert (row["floor_ms"] is not None) == on_cuda
        if row["arm"] != "hf":
            assert row["backend"] == ("graph" if on_cuda else "eager"), row["backend_reason"]
            assert "capture" not in row["phases_s"] and row["phases_s"]["verify"] > 0
    budgets = {row["arm"]: row["budget"] for row in result["rows"]}
    assert budgets == {"hf": None, "vanilla": None, "classic": None} | dict.fromkeys(
        ("magicdec", "specattn", "dustin", "dustin-streaming", "dustin-sparse"), 32
    )
    lengths = [prompt["length"] for prompt in result["prompts"]]
    assert lengths == ([32, 48, 64, 48, 72, 96] if ragged else [64] * 3 + [96] * 3)
    decode.report(result)
    printed = capsys.readouterr().out
    for word in ("dustin-sparse", "tau fresh", "x magicdec", "steady tok/s", "acceptance real: greedy, 24 new tokens"):
        assert word in printed


def of(result, row, arm):
    (found,) = [r for r in result["rows"] if (r["arm"], r["context"]) == (arm, row["context"])]
    return found


@pytest.mark.parametrize("ragged", [False, True])
def test_real_arms_write_what_stock_writes(ragged, monkeypatch):
    """From one prefill, whatever ran before; and nothing is prefilled twice."""
    target = tiny_model("qwen2", eos_token_id=None, dtype=torch.float64).double()
    draft = noisy_copy(target, 0.05)
    sources = {"a": torch.randint(3, 160, (400,), generator=torch.Generator().manual_seed(1)).tolist()}
    prompts = [prompt.tokens for prompt in texts.cut_prompts(sources, texts.row_lengths(64, 3, ragged))]
    expected = real_arms.stock(target, prompts, 24).rows
    profile = DustinProfile.default(target.config, draft.config)
    with dustin_hf.enable(target, profile=profile), registered_baselines(), torch.no_grad():
        point = real_arms.fill(target, draft, prompts, 24, 3)
        ids = point.inputs["input_ids"]
        pads, held = [64 - len(prompt) for prompt in prompts], [len(prompt) - 1 for prompt in prompts]
        monkeypatch.setattr(target.get_decoder(), "forward", forward_of_blocks(target.get_decoder()))
        for name in (*ARMS, *reversed(ARMS)):
            assert held_prefixes(point.cache, ids, pads) == held
            if name == "vanilla":
                run = real_arms.plain(target, draft, point, profile, 24, Pool())
            else:
                # a budget of all tokens: the sparse arms are exact, too
                run = real_arms.speculate(target, draft, point, ARMS[name], 3, 200, 24)
            assert run.rows == expected and len(run.stamps) == max(map(len, run.committed))
            assert [sum(row) for row in run.committed] == [24] * 3


@pytest.mark.parametrize("name", ARMS)
def test_what_an_arm_reads(name):
    models, prompts = (tiny_model("qwen2"), tiny_model("qwen2", seed=1)), torch.tensor(random_prompts([65, 65]))
    profile = DustinProfile.default(*(model.config for model in models))
    caches = tuple(DustinCache(model.config.num_hidden_layers, 2, 90, "cpu") for model in models)
    with dustin_hf.enable(models[0]), block_attention(*models), torch.no_grad():
        for model, cache in zip(models, caches):
            prefill(model, cache, prompts, [0, 0], [0, 0])
        arm = build(ARMS[name], *models, caches, [60, 40], profile, 3, 32, 8, greedy_accept)
        for _ in range(2):  # the first step reads everything
            report = speculative_step(arm.parts, arm.state, arm.gamma, None, Clock(torch.device("cpu")))
    policies = {"full": FullPolicy, "hybrid": HybridPolicy, "specattn": SpecAttnPolicy}
    assert type(arm.parts.policy) is policies[ARMS[name].mode]
    read, full = (report[REPORT.index(field)].tolist() for field in ("read", "full"))
    assert read == ([32 + 3 + 1] * 2 if ARMS[name].sparse else full)


def forward_of_blocks(decoder):
    """The forward, which refuses more tokens than a step has."""
    forward = decoder.forward

    def checked(*args, input_ids=None, **kwargs):
        assert input_ids.shape[1] <= 4
        return forward(*args, input_ids=input_ids, **kwargs)

    return checked


def test_stock_out_of_memory_is_a_row(monkeypatch, capsys):
    def short(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmuch more")

    monkeypatch.setattr(real, "stock", short)
    target = tiny_model()
    result = real.run_real(target, noisy_copy(target, 0.1), {"a": range(3, 100)}, (20,), (2,), 2, 32, ["hf"], 8, "x")
    (row,) = result["rows"]
    assert row["error"] == "OutOfMemoryError: CUDA out of memory." and "tokens_per_s" not in row
    decode.report(result)
    assert "hf, context 20, batch 2: OutOfMemoryError" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, message",
    [
        ({"arms": ["hf-static"]}, "--arms must be of hf, vanilla, .* for real models, got hf-static"),
        ({"new_tokens": 7}, "--new-tokens must be at least 8"),
        ({"contexts": (20, 500)}, "2 prompts of 500 tokens are needed"),
    ],
)
def test_impossible_real_runs(options, message):
    options = {"contexts": (20,), "batches": (2,), "gamma": 2, "budget": 32, "arms": ["hf"], "new_tokens": 8, **options}
    target = tiny_model()
    with pytest.raises(ValueError, match=message):
        real.run_real(target, target, {"a": range(3, 100)}, **options, command="x")


def test_loading_a_pair(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    target = tiny_model()
    target.save_pretrained(tmp_path)
    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="b"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path)
    loaded = texts.load_pair(str(tmp_path), str(tmp_path), "cpu")
    assert loaded[0] is not loaded[1] and loaded[0].dtype == torch.float32 and not loaded[0].training
    assert torch.equal(loaded[1].lm_head.weight, target.lm_head.weight)
    assert loaded[2]("a")["input_ids"] == [0]
    with pytest.raises(FileNotFoundError, match="--draft .*nothing"):
        texts.load_pair(str(tmp_path), str(tmp_path / "nothing"), "cpu")


def test_report_of_simulated_runs(capsys):
    row = {"arm": "dustin", "context": 9000, "batch": 2, "ragged": True, "gamma": 3, "budget": 512, "tau": 2.2}
    row |= {"step_ms": 10.0, "step_ms_low": 9.0, "step_ms_high": 11.0, "tokens_per_s": 1234.5, "floor_ms": 5.0}
    vanilla = {**row, "arm": "vanilla", "tau": 1.0, "tokens_per_s": 500.0, "budget": None}
    rows = decode.with_ratios([vanilla, row, {**row, "arm": "hf", "error": "no"}])
    result = {"rows": rows, "target": "big", "draft": "small", "acceptance": "simulated", "notes": "said"}
    decode.report({**result, "copy_rate_gb_s": 4000.0, "conditions": {"gpu": "some GPU"}})
    printed = capsys.readouterr().out
    for word in (
        "big with small, context up to 9000, batch 2",
        "1,23",
        "2.47",
        "50%",
        "some GPU, copy rate 4000",
        "said",
    ):
        assert word in printed
    # stock runs rows of one length, which are no measure for ragged ones
    bare = [{name: x for name, x in row.items() if not name.startswith("over")} for row in (vanilla, row, vanilla)]
    bare[2] |= {"arm": "hf", "ragged": False}
    assert not any("over_hf" in row for row in decode.with_ratios(bare)[:2])
    assert "copied" not in printed and "prefill" not in printed and "hf, context 9000, batch 2: no" in printed
