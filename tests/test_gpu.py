"""On CUDA devices, by hand: `pytest -m gpu`. The same texts as on the CPU, half precision, models on several."""

import copy

import pytest
import torch
from accelerate import dispatch_model
from helpers import dustin, padded, plain

from dustin_hf._compat import CACHE_ARG
from dustin_hf.testing import left_pad, random_prompts, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PROMPTS = random_prompts([12, 30, 5, 90])


def on(model, device, dtype=torch.float32):
    return copy.deepcopy(model).to(device, dtype)


def run(target, draft, device, **kwargs):
    """`helpers.dustin` with the inputs on a device."""
    import dustin_hf

    kwargs = {"do_sample": False, "max_new_tokens": 24, **kwargs}
    inputs = {name: x.to(device) for name, x in left_pad(PROMPTS).items()}
    with dustin_hf.enable(target):
        out = target.generate(
            **inputs,
            assistant_model=draft,
            cache_implementation="dustin",
            return_dict_in_generate=True,
            **kwargs,
        )
    return out.sequences[:, 90:].tolist(), out


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("budget", [24, 100_000])
def test_same_text_as_on_the_cpu(pair, kind, budget):
    expected, _ = dustin(pair.target, pair.drafts[kind], PROMPTS, budget=budget)
    target = on(pair.target, "cuda")
    draft = target if kind == "self" else on(pair.drafts[kind], "cuda")
    rows, out = run(target, draft, "cuda", cache_config={"budget": budget})
    assert rows == expected
    assert set(out.stats.seconds) == {"prefill", "draft", "select", "verify", "accept"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_half_precision_is_finite_p08(pair, dtype, attention):
    target, draft = on(pair.target, "cuda", dtype), on(pair.M, "cuda", dtype)
    target.set_attn_implementation(attention)
    seen = []
    target.lm_head.register_forward_hook(lambda module, args, out: seen.append(bool(out.isfinite().all())))
    _, out = run(target, draft, "cuda")
    assert seen and all(seen) and out[CACHE_ARG].layers[0].keys.dtype == dtype


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("budget", [24, 100_000])
def test_graph_equals_eager(pair, kind, budget):
    """Captured steps give the texts of eager ones, token for token, also in later calls of other shapes."""
    target = on(pair.target, "cuda")
    draft = target if kind == "self" else on(pair.drafts[kind], "cuda")
    ends = [7, 20, 33, 41, 52, 90, 111, 140]
    for new, gamma, eos in ((40, 4, None), (25, 2, ends), (40, 4, ends)):
        options = {"max_new_tokens": new, "num_assistant_tokens": gamma, "eos_token_id": eos, "pad_token_id": 0}
        results = [
            run(target, draft, "cuda", cache_config={"budget": budget, "backend": backend}, **options)
            for backend in ("eager", "graph")
        ]
        (eager_rows, eager), (rows, graph) = results
        assert rows == eager_rows
        assert graph.stats.backend == "graph" and graph.stats.seconds.get("step", 0) > 0
        for name in ("committed", "drafted", "kv_tokens_read", "kv_tokens_full", "draft_calls", "target_calls"):
            assert getattr(graph.stats, name) == getattr(eager.stats, name), name
        assert graph[CACHE_ARG].lengths.tolist() == eager[CACHE_ARG].lengths.tolist()


def test_graph_samples(pair):
    """Graphs draw new random numbers in every replay, and honour seeds."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    options = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "max_new_tokens": 60}
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        results.append(run(target, draft, "cuda", cache_config={"backend": "graph"}, **options)[0])
    assert results[0] == results[1] != results[2]


def test_what_cannot_be_captured(pair):
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    graph = {"cache_config": {"backend": "graph"}}
    with pytest.raises(ValueError, match="`backend='graph'` cannot be had here: processors"):
        run(target, draft, "cuda", repetition_penalty=1.2, **graph)
    hook = draft.lm_head.register_forward_hook(lambda module, args, out: bool(out.isfinite().all()))
    with pytest.raises(ValueError, match="hooks on the models would not run in replays"):
        run(target, draft, "cuda", **graph)
    hook.remove()
    assert run(target, draft, "cuda", **graph)[1].stats.backend == "graph"


@two
def test_graph_on_a_device_that_is_not_current(pair):
    target, draft = on(pair.target, "cuda:1"), on(pair.M, "cuda:1")
    eager, graph = (run(target, draft, "cuda:1", cache_config={"backend": name})[0] for name in ("eager", "graph"))
    assert eager == graph and torch.cuda.current_device() == 0


def test_sampling_and_processors(pair):
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 5, "repetition_penalty": 1.3}
    first, _ = run(on(pair.target, "cuda"), on(pair.M, "cuda"), "cuda", **options)
    torch.manual_seed(0)
    assert first == run(on(pair.target, "cuda"), on(pair.M, "cuda"), "cuda", **options)[0]


def test_memory_is_flat_p33(pair):
    """P-33: after every call the same memory is allocated."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    sizes = []
    for _ in range(4):
        run(target, draft, "cuda")
        torch.cuda.synchronize()
        sizes.append(torch.cuda.memory_allocated())
    assert len(set(sizes[1:])) == 1


@two
@pytest.mark.parametrize("split", [(2, 2), (1, 3)])
@pytest.mark.parametrize("current", [0, 1])
def test_split_model_p52_p53(family, split, current):
    """P-52, P-53: each layer's storage on its device; launches and the current device are right."""
    model = tiny_model(family, num_hidden_layers=4)
    expected = [plain(model, prompt) for prompt in PROMPTS]
    places = [0] * split[0] + [1] * split[1]
    device_map = {f"model.layers.{i}": place for i, place in enumerate(places)}
    device_map |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": 1}
    target = dispatch_model(copy.deepcopy(model), device_map)
    with torch.cuda.device(current):
        for draft in (on(model, "cuda:1"), target):
            rows, out = run(target, draft, "cuda:0")
            assert rows == padded(expected, max(map(len, expected)))
            assert [layer.keys.device.index for layer in out[CACHE_ARG].layers] == places
            sparse, _ = run(target, draft, "cuda:0", cache_config={"budget": 24})
            assert sparse == dustin(model, model if draft is target else copy.deepcopy(model), PROMPTS, budget=24)[0]
        assert torch.cuda.current_device() == current


@two
@pytest.mark.parametrize(
    "devices", [("cuda:1", "cuda:1"), ("cuda:0", "cuda:1"), ("cuda:1", "cuda:0"), ("cuda:0", "cpu")]
)
def test_assistant_on_another_device(pair, devices):
    expected, _ = dustin(pair.target, pair.M, PROMPTS, budget=24)
    target, draft = on(pair.target, devices[0]), on(pair.M, devices[1])
    rows, out = run(target, draft, devices[0], cache_config={"budget": 24})
    assert rows == expected
    assert out[CACHE_ARG].draft.layers[0].keys.device == torch.device(devices[1])
