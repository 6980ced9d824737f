"""Below full budget: the engine against the slow literal reference, and the sets it selects."""

import pytest
from helpers import dustin, heads
from reference import Reference

from dustin_hf import DustinProfile
from dustin_hf.selection import HybridPolicy
from dustin_hf.testing import random_prompts

PROFILE = DustinProfile(target_heads={0: (3,), 1: (0, 2)}, draft_heads={0: (1, 2), 1: (0,)}, draft_share=0.5)


@pytest.fixture
def selected(monkeypatch):
    """The slots of every step of every row, as the policy returned them."""
    seen = []
    select = HybridPolicy.select

    def spy(self, signals):
        selection = select(self, signals)
        seen.append([[i for i in row if i >= 0] for row in selection.indices[0, :, 0].tolist()])
        return selection

    monkeypatch.setattr(HybridPolicy, "select", spy)
    return seen


def run_both(target, draft, prompt, *, budget, mode, gamma, new, selected, sinks=2, window=3, draft_cache="full"):
    config = {"mode": mode, "sinks": sinks, "window": window, "draft_cache": draft_cache}
    rows, out = dustin(
        target, draft, [prompt], budget=budget, gamma=gamma, new=new, config=config, profile=PROFILE, eos_token_id=None
    )
    m = {"hybrid": round(0.5 * budget), "target": 0, "draft": budget}[mode]
    chosen = PROFILE.target_heads, PROFILE.draft_heads
    reference = Reference(target, draft, budget, sinks, window, m, *chosen, gamma, draft_cache == "sparse")
    expected = reference.generate(prompt, new)
    assert rows[0] == expected
    assert [row for step in selected for row in step] == [s for s in reference.sets if s is not None]
    assert all(len(s) <= budget for s in reference.sets if s is not None)
    return out


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("mode", ["hybrid", "target", "draft"])
def test_engine_equals_literal_reference(pair, kind, mode, selected):
    prompt = random_prompts([41], seed=5)[0]
    options = {"budget": 12, "mode": mode, "gamma": 3, "new": 14, "draft_cache": "auto" if kind == "self" else "full"}
    out = run_both(pair.target, pair.drafts[kind], prompt, selected=selected, **options)
    assert out.stats.kv_read_share < 1


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("mode", ["hybrid", "draft"])
@pytest.mark.parametrize("gamma", [1, 3, 6])
def test_sparse_drafts(pair, kind, mode, gamma, selected):
    prompt = random_prompts([41], seed=6)[0]
    options = {"budget": 12, "mode": mode, "gamma": gamma, "new": 20, "draft_cache": "sparse"}
    run_both(pair.target, pair.drafts[kind], prompt, selected=selected, **options)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 6, 11, 12, 13, 60])
@pytest.mark.parametrize("gamma", [1, 4, 7])
@pytest.mark.parametrize("draft_cache", ["full", "sparse"])
def test_short_prompts(pair, length, gamma, draft_cache, selected):
    """P-38, P-39: shorter than sinks + window, than the budget, one token; and around the budget."""
    prompt = random_prompts([length], seed=length)[0]
    options = {"budget": 12, "mode": "hybrid", "gamma": gamma, "new": 12, "draft_cache": draft_cache}
    run_both(pair.target, pair.M, prompt, selected=selected, **options)


@pytest.mark.parametrize("group", [(4, 4), (4, 2), (6, 1), (14, 2)])
def test_head_groupings(pairs, family, group, selected):
    pair = pairs(family, **heads(*group))
    prompt = random_prompts([50], seed=3)[0]
    run_both(pair.target, pair.M, prompt, budget=16, mode="hybrid", gamma=4, new=10, selected=selected)


def test_protected_tokens_count_and_stay_p39(pair, selected):
    """P-39: the first tokens and the recent window are always there, and count in the budget."""
    prompt = random_prompts([80])[0]
    dustin(pair.target, pair.M, [prompt], budget=21, new=20)
    length = len(prompt)
    assert selected
    for (slots,) in selected:
        assert len(slots) == 21 and slots[:4] == [0, 1, 2, 3]
        assert slots[-16:] == list(range(slots[-1] - 15, slots[-1] + 1)) and slots[-1] >= length - 1
