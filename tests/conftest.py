"""Fixtures: tiny targets and their drafts S (a copy), D (another model), M (agrees in part)."""

import copy
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton, or a kernel looks for a driver

from helpers import Pair

import dustin_hf
import dustin_hf.engine
from dustin_hf.testing import noisy_copy, tiny_model

torch.set_num_threads(1)


@pytest.fixture(params=["qwen2", "llama"])
def family(request):
    return request.param


@pytest.fixture(scope="session")
def pairs():
    """Makes the target of a family and configuration once, and its drafts with it."""
    made = {}

    def get(family="qwen2", **overrides):
        key = (family, tuple(sorted(overrides.items())))
        if key not in made:
            target = tiny_model(family, 0, **overrides)
            made[key] = Pair(
                target, S=copy.deepcopy(target), D=tiny_model(family, 1, **overrides), M=noisy_copy(target, 0.05)
            )
        return made[key]

    return get


@pytest.fixture
def pair(pairs, family):
    return pairs(family)


@pytest.fixture(autouse=True)
def leave_nothing_enabled():
    yield
    dustin_hf.disable()


@pytest.fixture(autouse=True)
def check_caches_after_each_step(monkeypatch):
    """Every step of every test leaves both caches whole."""
    step = dustin_hf.engine.speculative_step

    def checked(parts, state, *args):
        report = step(parts, state, *args)
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return report  # nothing has run yet
        gamma = args[0]
        parts.cache.check_integrity()
        parts.proposer.cache.check_integrity()
        # a draft's own cache lacks at most the token of a block accepted whole, and one more where nothing was drafted
        missing = parts.cache.lengths - parts.proposer.cache.lengths
        assert missing.min() >= 0 and missing.max() <= (1 if gamma > 0 else 2)
        return report

    monkeypatch.setattr(dustin_hf.engine, "speculative_step", checked)
