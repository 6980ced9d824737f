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
