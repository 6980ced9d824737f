"""Speculative sampling: the law of the target at full budget, whatever draft, vocabulary and processors."""

import itertools

import pytest
import torch
from helpers import dustin
from scipy.stats import chisquare

from dustin_hf.acceptance import greedy_accept, sampling_accept
from dustin_hf.testing import random_prompts, tiny_model

RUNS, NEW = 20_000, 3


def law_of_three_tokens(target, prompt, **sampling):
    """Exact probabilities of all continuations of three tokens, from stock's own processors and forward."""
    vocabulary = target.config.vocab_size
    probability = {}
    prefixes = {(): 1.0}
    for _ in range(NEW):
        ids = torch.tensor([prompt + list(p) for p in prefixes])
        config, _ = target._prepare_generation_config(None, do_sample=True, **sampling)
        target._prepare_special_tokens(config, True, device="cpu", batch_size=1)
        processors = target._get_logits_processor(config, len(prompt), ids, device="cpu")
        with torch.no_grad():
            logits = target(input_ids=ids).logits[:, -1]
        probs = processors(ids, logits).softmax(-1).tolist()
        probability = {
            (*prefix, token): mass * row[token]
            for (prefix, mass), row in zip(prefixes.items(), probs)
            for token in range(vocabulary)
        }
        prefixes = probability
    return probability


SAMPLING = {
    "temperature 1": {"temperature": 1.0, "top_k": 0},
    "temperature, top-k and top-p": {"temperature": 0.7, "top_k": 4, "top_p": 0.9},
    "min-p": {"temperature": 1.3, "top_k": 0, "min_p": 0.1},
    "repetition penalty": {"temperature": 0.9, "top_k": 6, "repetition_penalty": 1.4},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
@pytest.mark.parametrize("draft", ["other", "smaller vocabulary", "larger vocabulary", "self"])
def test_law_of_the_target_p19_p20(family, sampling, draft):
    """P-19, P-20: chi-square over all outcomes of three tokens; 20,000 runs; nothing outside the kept set, ever."""
    options = {"hidden_size": 32, "num_hidden_layers": 1, "eos_token_id": None, "initializer_range": 0.3}
    target = tiny_model(family, 0, vocab_size=8, **options)
    size = {"other": 8, "smaller vocabulary": 6, "larger vocabulary": 10, "self": 8}[draft]
    proposer = target if draft == "self" else tiny_model(family, 7, vocab_size=size, **options)
    prompt = [5, 3, 1, 4]
    law = law_of_three_tokens(target, prompt, **sampling)
    torch.manual_seed(1)
    counts = dict.fromkeys(itertools.product(range(8), repeat=NEW), 0)
    for _ in range(RUNS // 2000):
        rows, out = dustin(target, proposer, [prompt] * 2000, gamma=2, new=NEW, do_sample=True, **sampling)
        for row in rows:
            counts[tuple(row)] += 1
    assert sum(counts.values()) == RUNS
    assert not [outcome for outcome, n in counts.items() if n and law[outcome] < 1e-12]
    # outcomes too rare for the test are pooled
    common = [outcome for outcome in law if law[outcome] * RUNS >= 5]
    expected = [law[outcome] * RUNS for outcome in common]
    observed = [counts[outcome] for outcome in common]
    rest = RUNS - sum(expected)
    if rest > 1:
        expected.append(rest)
        observed.append(RUNS - sum(observed))
    total = sum(expected)
    p_value = chisquare(observed, [e * sum(observed) / total for e in expected]).pvalue
    assert p_value > 0.001
    assert draft == "self" or len(out.stats.histogram) > 1  # blocks were cut, or the test would prove little


def test_seeds_are_honoured_p21(pair):
    prompts = random_prompts([5, 30])
    results = []
    for _ in range(2):
        torch.manual_seed(0)
        results.append(dustin(pair.target, pair.M, prompts, do_sample=True, budget=24)[0])
    assert results[0] == results[1]
    torch.manual_seed(1)
    assert dustin(pair.target, pair.M, prompts, do_sample=True, budget=24)[0] != results[0]


def test_greedy_draws_no_random_numbers_p21(pair):
    torch.manual_seed(3)
    expected = [torch.rand(1).item() for _ in range(2)]
    torch.manual_seed(3)
    first = torch.rand(1).item()
    dustin(pair.target, pair.M, random_prompts([5, 30]))
    assert [first, torch.rand(1).item()] == expected


def law_of_first_token(p, q, runs=200_000):
    """Empirical law of the first token of a block when the draft draws from q."""
    drafts = torch.multinomial(q.expand(runs, -1), 1)
    probs = torch.stack([p, p]).expand(runs, 2, -1)
    tokens, accepted = sampling_accept(probs.log(), drafts, q.expand(runs, 1, -1))
    return torch.bincount(tokens[:, 0], minlength=len(p)) / runs, accepted.float().mean()


@pytest.mark.parametrize(
    "p, q",
    [
        ([0.2, 0.3, 0.5, 0.0], [0.2, 0.3, 0.5, 0.0]),  # equal: everything accepted, residual 0/0
        ([0.2, 0.3, 0.5, 0.0], [0.0, 0.0, 0.1, 0.9]),  # the draft misses tokens, and proposes impossible ones
        ([0.0, 0.0, 1.0, 0.0], [0.25, 0.25, 0.25, 0.25]),
        ([0.25, 0.25, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]),
    ],
)
def test_residual_law_p22(p, q):
    torch.manual_seed(0)
    p, q = torch.tensor(p), torch.tensor(q)
    law, accepted = law_of_first_token(p, q)
    assert torch.allclose(law, p, atol=0.005)
    assert (law[p == 0] == 0).all()
    assert abs(accepted - torch.minimum(p, q).sum()) < 0.005


def test_mixed_rows_p22():
    """P-22: none, some and all accepted in one batch; the extra token comes from the right position of each row."""
    torch.manual_seed(0)
    vocabulary, gamma = 6, 3
    drafts = torch.tensor([[0, 1, 2]] * 4)
    q = torch.nn.functional.one_hot(drafts, vocabulary).float()
    probs = torch.zeros(4, gamma + 1, vocabulary)
    for row, accepted in enumerate((0, 1, 2, 3)):
        for position in range(gamma + 1):
            token = drafts[row, position] if position < accepted else 3 + (position % 3)
            probs[row, position, token] = 1.0
    tokens, accepted = sampling_accept(probs.log(), drafts, q)
    assert accepted.tolist() == [0, 1, 2, 3]
    assert [row[: n + 1] for row, n in zip(tokens.tolist(), accepted.tolist())] == [
        [3],
        [0, 4],
        [0, 1, 5],
        [0, 1, 2, 3],
    ]


def test_forced_rejection_where_the_laws_are_equal_p22(monkeypatch):
    """P-22: p = q never rejects, but rounding may; then the residual is 0 and the target's law is drawn from."""
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 1.0))
    p = torch.tensor([[[0.5, 0.5, 0.0]]]).expand(500, 2, 3)
    tokens, accepted = sampling_accept(p.log(), torch.zeros(500, 1, dtype=torch.long), p[:, :1])
    assert accepted.sum() == 0
    assert set(tokens[:, 0].tolist()) == {0, 1}


def test_no_drafts():
    """A block of the target's token alone."""
    probs = torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]])
    tokens, accepted = sampling_accept(probs.log(), torch.zeros(2, 0, dtype=torch.long), None)
    assert tokens.tolist() == [[1], [0]] and accepted.tolist() == [0, 0]
    tokens, accepted = greedy_accept(probs, torch.zeros(2, 0, dtype=torch.long))
    assert tokens.tolist() == [[1], [0]] and accepted.tolist() == [0, 0]
