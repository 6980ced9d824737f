"""The replay: exact at full budget, equal to a literal dense computation below it, row by row; oracles bound ARR."""

import json
import math

import pytest
import torch
from reference import Reference

import dustin_hf
from dustin_hf import DustinProfile
from dustin_hf.eval.fidelity import fidelity, replay
from dustin_hf.eval.fidelity.measure import pearson
from dustin_hf.eval.fidelity.policies import OraclePolicy, build_arms, mode_names
from dustin_hf.selection import Selection, SelectionPolicy
from dustin_hf.testing import random_prompts, tiny_model

PROFILE = DustinProfile(target_heads={0: (3,), 1: (0, 2)}, draft_heads={0: (1, 2), 1: (0,)}, draft_share=0.5)
SINKS, WINDOW = 2, 3
MODES = mode_names()


@pytest.fixture
def endless(pair, monkeypatch):
    """A target that never ends a text."""
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", None)
    return pair


def run(pair, contexts, modes, budgets, *, draft=None, new=14, gamma=4, **kwargs):
    """Trajectory and runs by mode and budget."""
    draft = pair.M if draft is None else draft
    arms = build_arms(pair.target, draft, PROFILE, modes, budgets, SINKS, WINDOW)
    policies = [arm.policy for arm in arms]
    trajectory, runs = replay(pair.target, draft, contexts, policies, new_tokens=new, gamma=gamma, **kwargs)
    return trajectory, {(arm.mode, arm.budget): one for arm, one in zip(arms, runs)}


def literal(pair, draft, context, tokens, k, m, gamma):
    """KL and sameness of each token by dense forwards under explicit masks, and the sets; equations 5, 6 and 8."""
    heads = PROFILE.target_heads, PROFILE.draft_heads
    reference = Reference(pair.target, draft, k, SINKS, WINDOW, m, *heads, gamma)
    text, dense = context + tokens, [set(range(i + 1)) for i in range(len(context) + len(tokens))]
    rows, sets = dense[: len(context)], []
    for start in range(len(context), len(text), gamma):
        block = range(start, min(start + gamma, len(text)))
        past = reference.attention(pair.target, text[:start], rows, heads[0], start - 1, start)
        ahead = [reference.attention(draft, text[: i + 1], dense, heads[1], i, start) for i in block]
        chosen = reference.choose([sum(column) for column in zip(*ahead)], past, start, m)
        sets.append(chosen)
        rows = rows + [set(chosen) | set(range(start, i + 1)) for i in block]
    full, sparse = (
        reference.logits(pair.target, text, masks)[len(context) :].double().log_softmax(-1) for masks in (dense, rows)
    )
    return (full.exp() * (full - sparse)).sum(-1), full.argmax(-1) == sparse.argmax(-1), sets


def literal_arr(pair, context, tokens, sets, gamma):
    """ARR of each window with its own tokens, from stock attention weights."""
    pair.target.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = pair.target(input_ids=torch.tensor([context + tokens]), output_attentions=True)
    finally:
        pair.target.set_attn_implementation("sdpa")
    weights = torch.stack(out.attentions)[:, 0].mean(1)  # [layers, T, T]
    rates = []
    for start, chosen in zip(range(len(context), len(context + tokens), gamma), sets):
        rows = weights[:, start : start + gamma]
        rates.append(float((rows[:, :, chosen].sum(-1) + rows[:, :, start:].sum(-1)).mean()))
    return torch.tensor(rates)


@pytest.mark.parametrize("kind", ["S", "D", "self"])
def test_full_policy_is_exact(endless, kind):
    before = endless.target.config._attn_implementation, type(endless.target)
    contexts = random_prompts([40, 17, 1], seed=2)
    _, runs = run(endless, contexts, ["full"], [12], draft=endless.drafts[kind])
    assert runs["full", None].kl.max() < 1e-6 and runs["full", None].same.all()
    assert (runs["full", None].arr == 1).all()
    assert before == (endless.target.config._attn_implementation, type(endless.target))


def test_every_policy_is_exact_at_full_budget(endless):
    _, runs = run(endless, random_prompts([40, 17, 2], seed=2), MODES, [64])
    for one in runs.values():
        assert one.kl.max() < 1e-6 and one.same.all()
        assert torch.allclose(one.arr, torch.ones_like(one.arr), atol=1e-5)
        assert torch.allclose(one.arr_committed, torch.ones_like(one.arr), atol=1e-5)


@pytest.mark.parametrize("kind", ["D", "M", "self"])
@pytest.mark.parametrize("mode, m", [("hybrid", 6), ("target", 0), ("draft", 12)])
def test_replay_equals_literal_computation(endless, kind, mode, m):
    """KL, sameness and ARR, token by token; the last window is not full."""
    context, draft = random_prompts([41], seed=5)[0], endless.drafts[kind]
    trajectory, runs = run(endless, [context], [mode], [12], draft=draft)
    tokens = trajectory.tokens[0].tolist()
    kl, same, sets = literal(endless, draft, context, tokens, 12, m, 4)
    one = runs[mode, 12]
    assert kl.max() > 0.01  # the budget is small indeed
    assert torch.allclose(one.kl[0].double(), kl, atol=1e-4)
    assert torch.equal(one.same[0], same)
    assert torch.allclose(one.arr[0], literal_arr(endless, context, tokens, sets, 4), atol=1e-5)


def test_trajectory_is_the_models_own(endless):
    contexts = random_prompts([23, 9], seed=4)
    trajectory, _ = run(endless, contexts, ["full"], [12])
    for context, tokens in zip(contexts, trajectory.tokens.tolist()):
        out = endless.target.generate(
            input_ids=torch.tensor([context]),
            attention_mask=torch.ones(1, len(context), dtype=torch.long),
            max_new_tokens=14,
            do_sample=False,
        )
        assert out[0, len(context) :].tolist() == tokens
    assert trajectory.counted.all()


def test_oracle_bounds_every_policy(endless):
    """Of one set for all layers; sets for each layer bound it in turn."""
    _, runs = run(endless, random_prompts([60, 33], seed=7), MODES, [10, 16], new=20)
    for budget in (10, 16):
        oracle, per_layer = runs["oracle", budget].arr, runs["oracle-layers", budget].arr
        assert (per_layer >= oracle - 1e-6).all() and (per_layer > oracle).any()
        for mode in ("hybrid", "target", "draft", "streaming"):
            assert (runs[mode, budget].arr <= oracle + 1e-6).all()
    assert (runs["oracle", 16].arr >= runs["oracle", 10].arr).all()


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "full"])
def test_rows_and_policies_are_independent(pair, mode):
    """Ragged rows, of which some end early: each is as if alone, under one policy or many."""
    contexts = random_prompts([50, 31, 4, 1], seed=11)
    first, _ = run(pair, contexts, ["full"], [12], new=12)
    ends = int(first.tokens[0, 5])  # the first row ends amid its second window
    before = pair.target.generation_config.eos_token_id
    pair.target.generation_config.eos_token_id = [ends]
    try:
        trajectory, runs = run(pair, contexts, MODES, [12], new=12)
        for i, context in enumerate(contexts):
            alone, own = run(pair, [context], [mode], [12], new=12)
            counted = alone.counted[0]
            width = len(counted)
            assert torch.equal(trajectory.counted[i, :width], counted) and not trajectory.counted[i, width:].any()
            together, one = runs[mode, 12], own[mode, 12]
            assert torch.equal(trajectory.tokens[i, :width], alone.tokens[0])
            assert torch.allclose(together.kl[i, :width][counted], one.kl[0][counted], atol=1e-5)
            windows = one.arr.shape[1]
            for name in ("arr", "arr_committed"):
                a, b = getattr(together, name)[i, :windows], getattr(one, name)[0]
                assert torch.allclose(a, b, atol=1e-5, equal_nan=True)
    finally:
        pair.target.generation_config.eos_token_id = before
    assert trajectory.counted[0].sum() <= 5


def test_a_text_that_ends_at_once(endless, monkeypatch):
    context = random_prompts([20], seed=3)[0]
    trajectory, _ = run(endless, [context], ["full"], [12])
    monkeypatch.setattr(endless.target.generation_config, "eos_token_id", int(trajectory.tokens[0, 0]))
    result = fidelity(endless.target, endless.M, [context], PROFILE, [24], ["hybrid", "full"], 8)
    assert [row["kl"] for row in result["results"]] == [None, None]
    assert result["contexts"][0]["new_tokens"] == 0
    json.dumps(result, allow_nan=False)


def test_fidelity_sums_up(endless):
    contexts = {"long": random_prompts([60], seed=1)[0], "short": random_prompts([30], seed=2)[0]}
    seen = []
    budgets, modes = [10, 14], ["hybrid", "streaming", "oracle", "full"]
    options = {"sinks": SINKS, "window": WINDOW, "gamma": 4}
    result = fidelity(
        endless.target, endless.M, contexts, PROFILE, budgets, modes, 14,
        progress=lambda *step: seen.append(step), **options,
    )  # fmt: skip
    assert seen == [("fidelity", i, 8) for i in range(1, 9)]
    assert [(row["mode"], row["budget"]) for row in result["results"]] == [
        ("full", None), *[(mode, k) for k in budgets for mode in modes[:3]]
    ]  # fmt: skip
    assert [row["name"] for row in result["contexts"]] == ["long", "short"]
    _, runs = run(endless, list(contexts.values()), modes, budgets)
    for row in result["results"]:
        one = runs[row["mode"], row["budget"]]
        assert math.isclose(row["kl"], one.kl.double().mean(), abs_tol=1e-6)
        assert math.isclose(row["agreement"], one.same.double().mean(), abs_tol=1e-6)
        assert math.isclose(row["arr_committed"], one.arr_committed.double().mean(), abs_tol=1e-6)
        assert len(row["contexts"][0]["windows"]["kl"]) == 4
    assert result["pearson"]["runs"]["arr"] < 0 and result["pearson"]["windows"]["arr_committed"] < 0
    # appendix B: three policies of one context at one budget, then the mean over contexts
    sparse = [row for row in result["results"] if row["budget"] == 14]
    each = [[[row["contexts"][i][name] for row in sparse] for name in ("arr", "kl")] for i in range(2)]
    expected = sum(float(torch.corrcoef(torch.tensor(pair, dtype=torch.double))[0, 1]) for pair in each) / 2
    assert math.isclose(result["pearson"]["contexts 14"]["arr"], expected, abs_tol=1e-9)
    assert set(result["pearson"]) == {"runs", "windows", "contexts 10", "contexts 14"}
    together = fidelity(endless.target, endless.M, contexts, PROFILE, budgets, modes, 14, batch_size=2, **options)
    for a, b in zip(result["results"], together["results"]):
        assert math.isclose(a["kl"], b["kl"], abs_tol=1e-5) and math.isclose(a["arr"], b["arr"], abs_tol=1e-5)
    json.dumps(result, allow_nan=False)


def test_pearson():
    assert math.isclose(pearson([1, 2, 3, 4], [2, 4, 6, 8]), 1.0)
    x, y = [0.3, 0.1, 0.9, 0.4], [1.0, 3.0, 0.5, 0.7]
    assert math.isclose(pearson(x, y), float(torch.corrcoef(torch.tensor([x, y]))[0, 1]), abs_tol=1e-6)
    assert pearson([1, 2], [3, 4]) is None and pearson([1, 1, 1], [1, 2, 3]) is None


class PerHead(SelectionPolicy):
    def select(self, signals):
        return Selection(torch.zeros(1, len(signals.lengths), 2, 4, dtype=torch.int32))


def test_errors(endless):
    target, draft = endless.target, endless.M
    for contexts, options, message in (
        ([], {}, "`contexts` must be"),
        ([[5], []], {}, "`contexts` must be"),
        ([[5] * 510], {}, "limit is 512"),
        ([[5]], {"gamma": 0}, "must be positive"),
    ):
        with pytest.raises(ValueError, match=message):
            replay(target, draft, contexts, [], new_tokens=8, **options)
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        replay(target, tiny_model(vocab_size=2000), [[5]], [], new_tokens=4)
    for options, message in (
        ({"modes": ["magic"]}, "`mode` must be of hybrid"),
        ({"budgets": [20]}, "`budget` must be at least"),
        ({"budgets": []}, "nothing to compare"),
        ({"contexts": ["some text"]}, "pass the `tokenizer`"),
        ({"contexts": []}, "`contexts` is empty"),
        ({"batch_size": 0}, "`batch_size` must be positive"),
        ({"profile": DustinProfile({7: (0,)}, {0: (0,)})}, "names heads"),
    ):
        with pytest.raises(ValueError, match=message):
            fidelity(target, draft, **{"contexts": [[5, 6]], **options})
    with pytest.raises(ValueError, match="sets for whole layers"):
        replay(target, draft, [[5, 6, 7, 8, 9]], [PerHead()], new_tokens=4)
    with pytest.raises(RuntimeError, match="in a replay only"):
        OraclePolicy(4).select(None)
    assert not isinstance(target, dustin_hf.generation.DustinGenerationMixin)


@pytest.mark.parametrize(
    "mode, message", [("snapkv", "chooses once, at the end of the prompt"), ("quest", "choose in it")]
)
def test_policies_that_a_replay_cannot_compare(endless, mode, message):
    from dustin_hf.eval.baselines import registered_baselines

    target, draft = endless.target, endless.M
    with registered_baselines(), pytest.raises(ValueError, match=message):
        fidelity(target, draft, random_prompts([60]), budgets=[48], modes=[mode], new_tokens=4)
