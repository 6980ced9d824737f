"""Baselines on a CUDA device, by hand: `pytest -m gpu`. Captured steps give the texts of eager ones and of the CPU."""

import copy

import pytest
import torch
from helpers import dustin
from test_baselines import registered  # noqa: F401

import dustin_hf
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
