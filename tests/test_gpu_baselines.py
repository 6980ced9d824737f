"""Baselines on a CUDA device, by hand: `pytest -m gpu`. Captured steps give the texts of eager ones and of the CPU."""

import copy
import itertools

import pytest
import torch
from helpers import dustin
from test_baselines import registered  # noqa: F401

import dustin_hf
from dustin_hf import pool
from dustin_hf._compat import CACHE_ARG
from dustin_hf.engine import MOST_GRAPHS
from dustin_hf.eval.baselines import BASELINES
from dustin_hf.testing import left_pad, noisy_copy, random_prompts, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROMPTS = random_prompts([90, 70, 81])


@pytest.mark.parametrize("name", sorted(BASELINES))
def test_same_text_as_on_the_cpu(name, registered):  # noqa: F811
    target = tiny_model("qwen2", num_hidden_layers=3)
    target.generation_config.eos_token_id = None
    draft = noisy_copy(target, 0.1)
    expected, _ = dustin(target, draft, PROMPTS, budget=48, config={"mode": name})
    target, draft = (copy.deepcopy(model).cuda() for model in (target, draft))
    inputs = {key: x.cuda() for key, x in left_pad(PROMPTS).items()}
    with dustin_hf.enable(target):
        for backend in ("eager", "graph", "graph"):
            out = target.generate(
                **inputs,
                assistant_model=draft,
                cache_implementation="dustin",
                cache_config={"budget": 48, "mode": name, "backend": backend},
                num_assistant_tokens=4,
                max_new_tokens=24,
                do_sample=False,
                return_dict_in_generate=True,
            )
            assert out.sequences[:, 90:].tolist() == expected and out.stats.backend == backend
            assert 0.3 < out.stats.kv_read_share < 0.95


def test_many_methods_in_turn_from_one_prefill(registered, monkeypatch):  # noqa: F811
    """As evaluations run them: more methods than graphs are kept, over storage of changing shapes that soon goes."""
    monkeypatch.setattr(pool, "MOST_IDLE", 1)
    methods = list(itertools.product(("full", "hybrid", "target", "draft", *sorted(BASELINES)), (40, 48)))
    assert len(methods) > 2 * MOST_GRAPHS
    target = tiny_model("qwen2", num_hidden_layers=3)
    target.generation_config.eos_token_id = None
    draft = noisy_copy(target, 0.1)
    on_cuda = [copy.deepcopy(model).cuda() for model in (target, draft)]
    with dustin_hf.enable(on_cuda[0]):
        for prompts in (PROMPTS, random_prompts([300, 160], seed=3), PROMPTS[:2]):
            inputs, cache = {key: x.cuda() for key, x in left_pad(prompts).items()}, None
            width = inputs["input_ids"].shape[1]
            for mode, budget in methods:
                expected, _ = dustin(target, draft, prompts, budget=budget, config={"mode": mode})
                out = on_cuda[0].generate(
                    **inputs,
                    assistant_model=on_cuda[1],
                    cache_implementation="dustin",
                    cache_config={"budget": budget, "mode": mode, "backend": "graph"},
                    num_assistant_tokens=4,
                    max_new_tokens=24,
                    do_sample=False,
                    return_dict_in_generate=True,
                    **({} if cache is None else {CACHE_ARG: cache}),
                )
                cache = out[CACHE_ARG]
                assert out.sequences[:, width:].tolist() == expected, mode
                assert (out.stats.backend, out.stats.backend_reason) == ("graph", "one CUDA graph a step")
