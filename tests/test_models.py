"""Families, rotary scalings, drafts of every kind, and weights that are not what they seem."""

import copy

import accelerate
import pytest
import torch
from helpers import assert_rows_equal_plain, dustin, heads, padded, plain

import dustin_hf
from dustin_hf import modules
from dustin_hf._compat import CACHE_ARG
from dustin_hf.eval.fidelity import agreement
from dustin_hf.modules import modules_of, parameters_of
from dustin_hf.testing import left_pad, noisy_copy, random_prompts, tiny_model

PROMPTS = random_prompts([12, 30, 5])
MODES = ("hybrid", "target", "draft")


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_families(pairs, family, kind):
    pair = pairs(family, **heads(4, 2, head_dim=32))
    assert_rows_equal_plain(pair.target, pair.drafts[kind], PROMPTS)
    alone = [dustin(pair.target, pair.drafts[kind], [prompt], budget=24)[0][0] for prompt in PROMPTS]
    together, _ = dustin(pair.target, pair.drafts[kind], PROMPTS, budget=24)
    assert together == padded(alone, len(together[0]))


def test_mistral_with_a_window_is_refused_p27():
    target = tiny_model("mistral", sliding_window=16)
    with dustin_hf.enable(target), pytest.raises(ValueError, match=r"sliding-window attention in layers \[0, 1\]"):
        target.generate(**left_pad(PROMPTS), assistant_model=target, cache_implementation="dustin", max_new_tokens=4)


ROPES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("lengths", [[200, 7], [5, 9]])
def test_rotary_scalings_p28(family, rope, lengths):
    scaled = {"rope_parameters": {"rope_theta": 10000.0, **rope}}
    target = tiny_model(family, **scaled)
    prompts = random_prompts(lengths)
    expected = assert_rows_equal_plain(target, noisy_copy(target, 0.05), prompts, new=60).sequences
    _, other = dustin(tiny_model(family), tiny_model(family), prompts, new=60)
    assert not torch.equal(expected, other.sequences), "the scaling changes the text"


@pytest.mark.parametrize("length", [50, 100])
def test_draft_with_fewer_positions_p29(pair, family, length):
    """P-29: past the draft's position limit its frequencies are extrapolated; the text is the target's all the same."""
    draft = tiny_model(family, 0, max_position_embeddings=64)
    assert_rows_equal_plain(pair.target, draft, random_prompts([length]), new=40)


def test_longer_n_grams_than_text(pair):
    options = {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 50}
    assert_rows_equal_plain(pair.target, None, [[5, 6, 7]], new=3, **options)


def test_hooks_on_the_whole_model(pair):
    """They see prompts as well as blocks."""
    target = copy.deepcopy(pair.target)
    target.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 160}), with_kwargs=True
    )
    assert_rows_equal_plain(target, pair.M, random_prompts([12, 30, 5]))


@pytest.mark.parametrize("hooked", [0, 1])
def test_hooks_in_compiled_models(pair, hooked):
    target = copy.deepcopy(pair.target)
    target.model.layers[hooked].mlp.register_forward_hook(lambda module, args, out: out * 0.5)
    out = assert_rows_equal_plain(target, pair.M, random_prompts([12, 30]), config={"backend": "compiled"}, new=8)
    assert out.stats.backend_reason == "asked for; a model with hooks runs op by op"


@pytest.mark.parametrize("do_sample", [False, True])
def test_prompt_lookup(pair, do_sample):
    """Drafts from the text itself; no draft attention, so selection falls to the target's history."""
    prompts = [[7, 8, 9, 10, 11] * 6, random_prompts([40])[0], [5]]
    options = {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 3}
    if do_sample:
        torch.manual_seed(0)
        rows, out = dustin(pair.target, None, prompts, do_sample=True, **options, new=20)
        assert all(0 <= token < 160 for row in rows for token in row)
        return
    rows, out = dustin(pair.target, None, prompts, **options, new=60)
    expected = [plain(pair.target, prompt, new=60) for prompt in prompts]
    assert rows == padded(expected, max(map(len, expected)))
    assert out.stats.num_assistant_tokens == 4 and out.stats.tau > 1 and out[CACHE_ARG].draft is None
    hybrid, target = (
        dustin(pair.target, None, prompts, budget=24, config={"mode": m}, **options)[0] for m in ("hybrid", "target")
    )
    assert hybrid == target
    alone = [dustin(pair.target, None, [prompt], budget=24, **options)[0][0] for prompt in prompts]
    assert hybrid == padded(alone, len(hybrid[0]))


def test_prompt_lookup_sampling_has_the_targets_law(family):
    """Drafts that were not drawn are judged with probability 1."""
    options = {"hidden_size": 32, "num_hidden_layers": 1, "eos_token_id": None, "initializer_range": 0.3}
    target = tiny_model(family, 0, vocab_size=8, **options)
    prompt = [5, 3, 5, 3, 5, 3]
    with torch.no_grad():
        law = target(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1)
    torch.manual_seed(0)
    rows, out = dustin(target, None, [prompt] * 8000, do_sample=True, top_k=0, prompt_lookup_num_tokens=2, new=3)
    found = torch.bincount(torch.tensor([row[0] for row in rows]), minlength=8) / 8000
    assert torch.allclose(found, law, atol=0.02)
    assert {1, 2, 3} <= set(out.stats.histogram)


def test_lookup_counts_only_what_it_found(pair):
    """A row without a match drafts nothing, beside one that does."""
    prompts = [[7, 8, 9] * 8, list(range(20, 40))]
    _, out = dustin(pair.target, None, prompts, prompt_lookup_num_tokens=3, new=1 + 3, eos_token_id=None)
    assert out.stats.drafted[0] >= 3 and out.stats.committed[1][0] == 1


def test_draft_in_another_dtype(pair):
    draft = copy.deepcopy(pair.M).to(torch.bfloat16)
    out = assert_rows_equal_plain(pair.target, draft, PROMPTS)
    assert out[CACHE_ARG].draft.layers[0].keys.dtype == torch.bfloat16
    assert out[CACHE_ARG].layers[0].keys.dtype == torch.float32


@pytest.mark.parametrize("budget", [24, 100_000])
def test_streaming_cache_of_an_assistant(pair, budget):
    rows, _ = dustin(pair.target, pair.M, PROMPTS, budget=budget, config={"draft_cache": "streaming"})
    alone = [
        dustin(pair.target, pair.M, [p], budget=budget, config={"draft_cache": "streaming"})[0][0] for p in PROMPTS
    ]
    assert rows == padded(alone, len(rows[0]))


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # of stock before 5.24, on meta weights
def test_offloaded_weights_p54(pair):
    """P-54: weights are placeholders outside their own forward."""
    target, draft = copy.deepcopy(pair.target), copy.deepcopy(pair.M)
    expected = [plain(pair.target, prompt) for prompt in PROMPTS]
    for model in (target, draft):
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        assert model.lm_head.weight.device.type == "meta"
    rows, out = dustin(target, draft, PROMPTS)
    assert rows == padded(expected, max(map(len, expected)))
    assert out[CACHE_ARG].layers[0].keys.device.type == "cpu"


class LinearLookAlike(torch.nn.Module):
    """A quantised linear layer: bytes and a scale, no `.weight`; answers in the dtype of its input."""

    def __init__(self, linear):
        super().__init__()
        self.scale = torch.nn.Buffer(linear.weight.detach().abs().amax() / 127)
        self.packed = torch.nn.Buffer((linear.weight.detach() / self.scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x):
        return torch.nn.functional.linear(x, (self.packed * self.scale).to(x.dtype), self.bias)


def quantise(model):
    model = copy.deepcopy(model)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            parent, leaf = name.rsplit(".", 1)
            setattr(model.model.get_submodule(parent), leaf, LinearLookAlike(module))
    return model


@pytest.mark.parametrize("which", ["target", "draft", "both"])
def test_quantised_look_alikes_p55_p56(pair, which):
    """P-55, P-56: nothing reads weights; dtypes follow the key states. The oracle is the same quantised model."""
    target = quantise(pair.target) if which != "draft" else pair.target
    draft = quantise(pair.M) if which != "target" else pair.M
    out = assert_rows_equal_plain(target, draft, PROMPTS)
    assert out[CACHE_ARG].layers[0].keys.dtype == torch.float32


def test_autocast_p55(pair):
    """P-55: under autocast values come in bfloat16 and rotated keys in float32; storage follows each."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, out = dustin(pair.target, pair.M, PROMPTS)
    layer = out[CACHE_ARG].layers[0]
    assert layer.values.dtype == torch.bfloat16 and layer.keys.dtype == torch.float32
    assert len(out.stats.histogram) > 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_near_ties_in_half_precision_p45(pair, dtype):
    """P-45: where 16-bit texts differ from plain ones, the float32 model has its two best tokens close together."""
    target, draft = (copy.deepcopy(model).to(dtype) for model in (pair.target, pair.M))
    prompts = random_prompts([20, 64, 33, 90, 7, 50])
    rows, _ = dustin(target, draft, prompts, new=40)
    for prompt, row in zip(prompts, rows):
        expected = plain(target, prompt, new=40)
        for i, (a, b) in enumerate(zip(row, expected)):
            if a != b:
                with torch.no_grad():
                    logits = pair.target(input_ids=torch.tensor([prompt + expected[:i]])).logits[0, -1]
                best = logits.topk(2).values
                assert best[0] - best[1] < 0.05 * logits.std(), (i, best)
                break


def test_large_biases_in_float16_p44(family):
    """P-44: key biases of 300 and query biases of 30 overflow a half-precision score; the text is finite and close."""
    target = tiny_model("qwen2") if family == "qwen2" else tiny_model("llama", attention_bias=True)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.k_proj.bias += 300
            layer.self_attn.q_proj.bias += 30
    half = copy.deepcopy(target).to(torch.float16)
    seen = []
    hook = half.lm_head.register_forward_hook(lambda module, args, out: seen.append(bool(out.isfinite().all())))
    prompt = random_prompts([100])[0]
    for budget in (40, 100_000):
        _, out = dustin(half, half, [prompt], new=20, budget=budget)
        assert len(set(out.sequences[0, 100:].tolist())) > 1
    hook.remove()
    assert seen and all(seen)
    assert agreement(half, out.sequences[0], 100) > 0.9


def test_rejections_leave_no_trace_p40(pair):
    """P-40: after many rounds of rejected drafts the caches hold what a prefill of the text holds."""
    prompt = random_prompts([50])[0]
    _, out = dustin(pair.target, pair.D, [prompt], new=40, gamma=4, eos_token_id=None)
    cache, text = out[CACHE_ARG], out.sequences[0].tolist()
    assert out.stats.tau < 1.5 and len(out.stats.committed[0]) > 20
    _, fresh = dustin(pair.target, pair.D, [text], new=1)
    for ours, theirs, n in ((cache, fresh[CACHE_ARG], 89), (cache.draft, fresh[CACHE_ARG].draft, 88)):
        for a, b in zip(ours.layers, theirs.layers):
            torch.testing.assert_close(a.keys[:, :, :n], b.keys[:, :, :n], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(a.values[:, :, :n], b.values[:, :, :n], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window, gamma, lengths", [(32, 4, [1, 5]), (64, 7, [5, 40]), (16, 7, [3, 1])])
def test_prompts_shorter_than_the_window_p38(pair, window, gamma, lengths):
    prompts = random_prompts(lengths)
    rows, _ = dustin(pair.target, pair.M, prompts, gamma=gamma, budget=window + 30, config={"window": window}, new=20)
    for row, prompt in zip(rows, prompts):
        expected = plain(pair.target, prompt, new=20)
        assert row[: len(expected)] == expected


def test_walks_find_what_torch_lists():
    model = tiny_model("llama")
    model.twice = model.model.layers[0]  # a module with two names
    assert {id(m) for m in modules_of(model)} == {id(m) for m in model.modules()}
    assert {id(p) for p in parameters_of(model)} == {id(p) for p in model.parameters()}
    assert len(modules_of(model)) == len(list(model.modules()))


def test_a_call_walks_through_each_model_once(pair, monkeypatch):
    walked = []
    walk = modules._walk
    monkeypatch.setattr(modules, "_walk", lambda model: walked.append(model) or walk(model))
    for _ in range(2):
        dustin(pair.target, pair.S, random_prompts([9, 5]), config={"backend": "compiled"}, new=4)
        assert sorted(map(id, walked)) == sorted(map(id, (pair.target, pair.S)))
        walked.clear()  # the next call sees what has changed since


def test_walks_of_a_call_are_forgotten_with_it():
    model = tiny_model("llama")
    with modules.walking_once():
        before = modules_of(model)
        model.one_more = torch.nn.Identity()
        with modules.walking_once():  # a call within a call, by a processor say
            assert model.one_more in modules_of(model)
        assert modules_of(model) is before
    assert model.one_more in modules_of(model)
