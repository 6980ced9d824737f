"""Below full budget: the engine against the slow literal reference, and the sets it selects."""

from dataclasses import replace

import pytest
import torch
from helpers import dustin, heads
from reference import Reference

from dustin_hf import DustinProfile
from dustin_hf.profile import LayerGroup
from dustin_hf.scoring import HeadScorer
from dustin_hf.selection import HybridPolicy, LayeredPolicy
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


GROUPS = LayerGroup(0, {1: (0, 2)}, {1: (0,)}, 0.25), LayerGroup(1, {0: (3,)}, {0: (1, 2)}, 0.75)


@pytest.mark.parametrize(
    "mode, draft_cache", [("hybrid", "full"), ("hybrid", "sparse"), ("draft", "sparse"), ("target", "full")]
)
def test_equal_layer_groups_are_one_set(pair, mode, draft_cache):
    same = [LayerGroup(i, PROFILE.target_heads, PROFILE.draft_heads, 0.5) for i in range(2)]
    options = {"budget": 12, "new": 14, "config": {"mode": mode, "draft_cache": draft_cache, "window": 3}}
    rows, out = dustin(pair.target, pair.M, random_prompts([41, 30]), profile=PROFILE, **options)
    grouped = replace(PROFILE, layer_groups=tuple(same))
    again, stats = dustin(pair.target, pair.M, random_prompts([41, 30]), profile=grouped, **options)
    assert rows == again and out.stats.kv_read_share == stats.stats.kv_read_share


def test_layer_groups_choose_by_their_own_heads(pair, monkeypatch):
    """Each layer reads the set that a run with its group's heads alone would give it, from the same signals."""
    seen, select = [], LayeredPolicy.select

    def spy(self, signals):
        found = select(self, signals)
        for group, slots in zip(GROUPS, found.indices):
            by_target, by_draft = (
                HeadScorer(heads, pair.target.config.num_attention_heads // 2, self.parts[0].target_scorer.scale)
                for heads in (group.target_heads, group.draft_heads)
            )
            asked = {layer: signals.target_queries[layer] for layer in group.target_heads}
            ahead = {layer: signals.draft_queries[layer] for layer in group.draft_heads if signals.draft_queries}
            lookahead = by_draft(ahead, signals.draft_cache, signals.lengths, signals.draft_counts) if ahead else None
            alone = HybridPolicy(
                k=12, sinks=4, window=3, m=round(12 * group.draft_share), target=by_target, draft=by_draft
            ).select(
                replace(
                    signals,
                    target_scores=by_target(
                        asked, signals.target_cache, signals.lengths, torch.ones_like(signals.lengths)
                    ),
                    draft_scores=lookahead,
                )
            )
            assert torch.equal(alone.indices[0], slots)
        seen.append(not torch.equal(*found.indices))
        assert found.layer_sets == (0, 1)
        return found

    monkeypatch.setattr(LayeredPolicy, "select", spy)
    profile, prompts = replace(PROFILE, layer_groups=GROUPS), random_prompts([41, 30, 2])
    options = {"budget": 12, "new": 14, "gamma": 3, "config": {"window": 3}, "profile": profile, "eos_token_id": None}
    rows, _ = dustin(pair.target, pair.M, prompts, **options)
    assert any(seen)
    for row, prompt in zip(rows, prompts):
        assert dustin(pair.target, pair.M, [prompt], **options)[0] == [row]
