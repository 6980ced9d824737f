"""On CUDA devices, by hand: `pytest -m gpu`. The same texts as on the CPU, half precision, models on several."""

import copy
import gc
import threading

import pytest
import torch
from accelerate import dispatch_model
from helpers import dustin, padded, plain
from transformers import RepetitionPenaltyLogitsProcessor

import dustin_hf
from dustin_hf import DustinProfile
from dustin_hf._compat import CACHE_ARG
from dustin_hf.profile import LayerGroup
from dustin_hf.testing import left_pad, random_prompts, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
PROMPTS = random_prompts([12, 30, 5, 90])


def on(model, device, dtype=torch.float32):
    return copy.deepcopy(model).to(device, dtype)


def run(target, draft, device, profile=None, **kwargs):
    """`helpers.dustin` with the inputs on a device."""
    kwargs = {"do_sample": False, "max_new_tokens": 24, **kwargs}
    inputs = {name: x.to(device) for name, x in left_pad(PROMPTS).items()}
    with dustin_hf.enable(target, profile=profile):
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
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_same_text_as_on_the_cpu(pair, kind, budget, backend):
    expected, _ = dustin(pair.target, pair.drafts[kind], PROMPTS, budget=budget)
    target = on(pair.target, "cuda")
    draft = target if kind == "self" else on(pair.drafts[kind], "cuda")
    rows, out = run(target, draft, "cuda", cache_config={"budget": budget, "backend": backend})
    assert rows == expected
    assert out.stats.backend == ("eager" if backend == "eager" else "graph")
    assert set(out.stats.seconds) - {"capture"} == {"prefill", "draft", "select", "verify", "accept"}


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize(
    "config", [{"budget": 24}, {"budget": 100_000}, {"budget": 24, "draft_cache": "sparse"}], ids=str
)
def test_graph_equals_eager(pair, kind, config):
    """Captured steps give the texts of eager ones, token for token, also in later calls, with other shapes between."""
    target = on(pair.target, "cuda")
    draft = target if kind == "self" else on(pair.drafts[kind], "cuda")
    ends = [7, 20, 33, 41, 52, 90, 111, 140]
    captures = []
    with dustin_hf.enable(target):
        for new, gamma, eos in ((40, 4, None), (25, 2, ends), (40, 4, ends), (38, 4, None)):
            options = {"max_new_tokens": new, "num_assistant_tokens": gamma, "eos_token_id": eos, "pad_token_id": 0}
            eager_rows, out = run(target, draft, "cuda", cache_config={**config, "backend": "eager"}, **options)
            eager, lengths = out.stats, out[CACHE_ARG].lengths.tolist()
            del out
            rows, graph = run(target, draft, "cuda", cache_config={**config, "backend": "graph"}, **options)
            assert rows == eager_rows
            assert graph.stats.backend == "graph" and "one CUDA graph a step" in graph.stats.backend_reason
            for name in ("committed", "drafted", "target_calls"):
                assert getattr(graph.stats, name) == getattr(eager, name), name
            assert graph.stats.kv_read_share == pytest.approx(eager.kv_read_share, rel=0.05)
            assert graph[CACHE_ARG].lengths.tolist() == lengths
            captures.append("capture" in graph.stats.seconds)
            del graph
    assert captures == [True, True, True, False]  # the last call finds the step of the first


def test_graph_samples(pair):
    """Graphs draw new random numbers in every replay, and honour seeds."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    options = {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8, "max_new_tokens": 60}
    results = []
    with dustin_hf.enable(target):
        for seed in (0, 0, 0, 1):
            torch.manual_seed(seed)
            rows, out = run(target, draft, "cuda", cache_config={"backend": "graph"}, **options)
            assert "one CUDA graph a step" in out.stats.backend_reason
            results.append(rows)
    assert results[1] == results[2] != results[3]


def test_forwards_are_captured_where_the_host_has_a_say(pair):
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    options = {"no_repeat_ngram_size": 3, "max_new_tokens": 40}
    expected, _ = run(target, draft, "cuda", cache_config={"budget": 24, "backend": "eager"}, **options)
    rows, out = run(target, draft, "cuda", cache_config={"budget": 24}, **options)
    assert rows == expected and "processors look at the text" in out.stats.backend_reason
    rows, out = run(target, draft, "cuda", cache_config={"budget": 24}, output_scores=True, max_new_tokens=40)
    expected, eager = run(
        target, draft, "cuda", cache_config={"budget": 24, "backend": "eager"}, output_scores=True, max_new_tokens=40
    )
    assert rows == expected and "collected" in out.stats.backend_reason
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(out.scores, eager.scores))


@pytest.mark.parametrize("sampled", [False, True])
def test_stock_processors_of_the_text_are_captured(pair, sampled):
    """As the generation config of a Qwen2.5 chat model has them."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    options = {"repetition_penalty": 1.3, "min_new_tokens": 30, "max_new_tokens": 40, "eos_token_id": [7, 20, 33]}
    options |= {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8} if sampled else {}
    results = []
    for backend in ("eager", "graph", "graph"):
        torch.manual_seed(0)
        rows, out = run(target, draft, "cuda", cache_config={"budget": 24, "backend": backend}, **options)
        results.append(rows)
    assert "one CUDA graph a step" in out.stats.backend_reason
    assert results[1] == results[2] and (sampled or results[0] == results[1])
    assert all(not {7, 20, 33} & set(row[:30]) for row in rows)


def test_captured_penalties_that_skip_pads(pair):
    """Stock makes them for batches with pads: each call has its own, the captured step serves all."""
    target, draft, found = on(pair.target, "cuda"), on(pair.M, "cuda"), []
    with dustin_hf.enable(target):
        for skipped in ([78, 60, 85, 0], [80, 70, 86, 40]):
            penalty = RepetitionPenaltyLogitsProcessor(1.7)
            penalty.prompt_ignore_length = torch.tensor(skipped)
            for backend in ("graph", "eager"):
                config = {"budget": 24, "backend": backend}
                rows, out = run(target, draft, "cuda", cache_config=config, logits_processor=[penalty])
                found.append(rows)
                assert backend == "eager" or out.stats.backend_reason == "one CUDA graph a step"
                assert ("capture" in out.stats.seconds) == (backend == "graph" and len(found) == 1)
    assert found[0] == found[1] != found[2] == found[3]


def test_what_cannot_be_captured(pair):
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    hook = draft.lm_head.register_forward_hook(lambda module, args, out: print(out.shape))
    with pytest.raises(ValueError, match="hooks on the models would not run in replays"):
        run(target, draft, "cuda", cache_config={"backend": "graph"})
    assert run(target, draft, "cuda")[1].stats.backend == "eager"
    hook.remove()
    assert run(target, draft, "cuda")[1].stats.backend == "graph"


def test_new_weights_are_seen_by_old_graphs(pair):
    """In-place changes of weights reach captured steps and merged projections; a moved model is captured anew."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    with dustin_hf.enable(target):
        first, _ = run(target, draft, "cuda", max_new_tokens=40)
        with torch.no_grad():
            target.model.layers[0].self_attn.k_proj.weight.mul_(-1.0)
        changed, _ = run(target, draft, "cuda", max_new_tokens=40)
        expected, _ = run(target, draft, "cuda", max_new_tokens=40, cache_config={"backend": "eager"})
        assert changed == expected != first
        target.to("cpu")
        keep = torch.empty(10_000_000, device="cuda")  # noqa: F841  # takes the memory that is free now
        target.to("cuda")
        assert run(target, draft, "cuda", max_new_tokens=40)[0] == expected


def test_layer_groups(pair):
    """Sets of their own for groups of layers: the text of the CPU, op by op and captured."""
    groups = LayerGroup(0, {1: (0, 2)}, {1: (0,)}, 0.25), LayerGroup(1, {0: (3,)}, {0: (1, 2)}, 0.75)
    profile = DustinProfile({0: (3,)}, {0: (1,)}, layer_groups=groups)
    expected, _ = dustin(pair.target, pair.M, PROMPTS, budget=24, profile=profile, config={"draft_cache": "sparse"})
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    with dustin_hf.enable(target):  # keeps graphs between the calls
        for backend in ("eager", "graph", "graph"):
            config = {"budget": 24, "backend": backend, "draft_cache": "sparse"}
            rows, out = run(target, draft, "cuda", profile, cache_config=config)
            assert rows == expected and out.stats.backend == backend


def allocated():
    """Bytes on the GPU without cuBLAS's workspaces: a process keeps one for each stream, also the capturing one."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def test_memory_is_released_with_the_handle(pair):
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    before = allocated()
    with dustin_hf.enable(target):
        for new in (10, 200, 400):
            run(target, draft, "cuda", max_new_tokens=new)
        assert torch.cuda.memory_allocated() > before
    assert allocated() == before


@pytest.mark.parametrize("whole", [True, False])
def test_captured_again_after_the_last_graph_has_gone(pair, whole):
    """A later call is captured too where graphs of earlier ones had to go, as those of single forwards always do."""
    torch._C._cuda_clearCublasWorkspaces()  # so that one lies in the graphs' memory, and keeps it known to torch
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    options = {"cache_config": {"budget": 24, "backend": "graph"}, "eos_token_id": None, "pad_token_id": 0}
    options |= {} if whole else {"no_repeat_ngram_size": 3}
    with dustin_hf.enable(target):
        for new in (40, 200, 40):
            _, out = run(target, draft, "cuda", max_new_tokens=new, **options)
            assert out.stats.backend == "graph" and ("one CUDA graph a step" in out.stats.backend_reason) == whole
            assert not whole or "capture" in out.stats.seconds
            del out
            gc.collect()
            target._dustin_pool.make_room()


@two
def test_graph_on_a_device_that_is_not_current(pair):
    for device in ("cuda:0", "cuda:1"):  # the first one that captures must not decide for all
        target, draft = on(pair.target, device), on(pair.M, device)
        (eager, _), (graph, out) = (run(target, draft, device, cache_config={"backend": x}) for x in ("eager", "graph"))
        assert eager == graph and torch.cuda.current_device() == 0 and out.stats.backend == "graph"


def test_autocast_between_other_calls(pair):
    """Storage that waits is of the dtype of its last call, and graphs point at it."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    with dustin_hf.enable(target):
        first, _ = run(target, draft, "cuda")
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.bfloat16):
                _, out = run(target, draft, "cuda")
            assert "autocast is on" in out.stats.backend_reason
            del out
            again, out = run(target, draft, "cuda")
            assert again == first and out.stats.backend == "graph"
            del out


def test_processors_that_wait_for_numbers(pair):
    """They run between graphs, and steps of other calls are captured whole before and after."""
    target, draft = on(pair.target, "cuda"), on(pair.M, "cuda")
    with dustin_hf.enable(target):
        for options, reason in (
            ({}, "one CUDA graph a step"),
            ({"do_sample": True, "eta_cutoff": 1e-3}, "processors look at numbers"),
            ({"suppress_tokens": list(range(60, 140))}, "one CUDA graph a step"),
            ({"eos_token_id": list(range(3, 40)), "pad_token_id": 0}, "one CUDA graph a step"),
        ):
            rows, out = run(target, draft, "cuda", **options)
            assert out.stats.backend == "graph" and reason in out.stats.backend_reason
            if not options.get("do_sample"):
                assert rows == run(target, draft, "cuda", cache_config={"backend": "eager"}, **options)[0]
            del out


def test_calls_in_several_threads(pair):
    """Of one target, and of two that capture at the same time, while others draw random numbers op by op."""
    targets = [on(pair.target, "cuda") for _ in range(2)]
    draft, found = on(pair.M, "cuda"), {}
    eager, one_choice = {"backend": "eager"}, {"do_sample": True, "top_k": 1}
    expected = run(targets[0], draft, "cuda", cache_config=eager)[0]

    def several(i):
        """Calls whose first captures come at any time of the others' calls."""
        options = one_choice if i >= 4 else {}
        options |= {"cache_config": eager} if i >= 6 else {}
        rows = [run(targets[i % 2], draft, "cuda", **options)[0] for _ in range(3)]
        found[i] = rows == [expected] * 3

    with dustin_hf.enable(targets[0]), dustin_hf.enable(targets[1]):
        threads = [threading.Thread(target=several, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert found == dict.fromkeys(range(8), True)


@pytest.mark.parametrize("budget", [8192, 9000, 100_000])
def test_budgets_of_thousands(budget):
    """More slots than a kernel selects, from a row that has them."""
    model = tiny_model("qwen2", max_position_embeddings=16_384).cuda()
    prompts = random_prompts([9200, 8500])
    inputs = {name: x.cuda() for name, x in left_pad(prompts).items()}
    with dustin_hf.enable(model):
        out = model.generate(
            **inputs,
            assistant_model=on(model, "cuda"),
            cache_implementation="dustin",
            cache_config={"budget": budget},
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=None,
        )
    if budget > 9300:
        assert out[:, 9200:].tolist() == [plain(model, prompt, new=20, eos_token_id=None) for prompt in prompts]
    assert out.shape == (2, 9220)


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
