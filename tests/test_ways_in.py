"""Ways to reach generate: pipelines, custom_generate folders, gradient modes, constrained decoding, compiled models."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import dustin, padded, plain
from test_outputs import Characters
from transformers import LogitsProcessor, LogitsProcessorList, pipeline

import dustin_hf
from dustin_hf import DustinConfig, DustinProfile
from dustin_hf.testing import left_pad, random_prompts, tiny_model

PROMPTS = random_prompts([12, 30, 5])
METHOD = Path(__file__).parents[1] / "examples" / "custom_generate"


def expected_rows(target, new=24, **kwargs):
    rows = [plain(target, prompt, new=new, **kwargs) for prompt in PROMPTS]
    return padded(rows, max(map(len, rows)))


def test_pipeline(pair):
    """`pipeline("text-generation", model=..., assistant_model=...)`, one text and a batch of texts."""
    tokenizer = Characters()
    tokenizer.padding_side = "left"
    texts = [tokenizer.decode(prompt) for prompt in PROMPTS]
    options = {"max_new_tokens": 12, "do_sample": False, "return_full_text": False}
    plain_pipe = pipeline("text-generation", model=pair.target, tokenizer=tokenizer)
    expected = [plain_pipe(text, **options)[0]["generated_text"] for text in texts]
    with dustin_hf.enable(pair.target):
        pipe = pipeline("text-generation", model=pair.target, tokenizer=tokenizer, assistant_model=pair.M)
        options |= {"cache_implementation": "dustin", "cache_config": {"budget": 999}}
        assert [pipe(text, **options)[0]["generated_text"] for text in texts] == expected
        batch = pipe(texts, batch_size=3, **options)
    assert [out[0]["generated_text"] for out in batch] == expected


@pytest.mark.parametrize("another_is_enabled", [False, True])
def test_custom_generate_folder(pair, another_is_enabled):
    """A folder that a Hub repository can ship; the model was never enabled by its user."""
    with dustin_hf.enable(pair.S) if another_is_enabled else nullcontext():
        out = pair.target.generate(
            **left_pad(PROMPTS),
            assistant_model=pair.M,
            cache_implementation="dustin" if another_is_enabled else None,
            cache_config={"budget": 999},
            max_new_tokens=24,
            do_sample=False,
            return_dict_in_generate=True,
            custom_generate=str(METHOD),
            trust_remote_code=True,
        )
    assert out.sequences[:, 30:].tolist() == expected_rows(pair.target) and out.stats.options["budget"] == 999
    assert not hasattr(pair.target, "_dustin_profiles")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradient_modes(pair, mode):
    with mode():
        rows, out = dustin(pair.target, pair.M, PROMPTS)
    assert rows == expected_rows(pair.target)
    assert not out.get("cache", out.get("past_key_values")).layers[0].keys.requires_grad


def test_training_mode_is_warned_of(pair, caplog, monkeypatch):
    import logging

    monkeypatch.setattr(logging.getLogger("dustin_hf.generation"), "propagate", True)
    pair.target.train()
    try:
        rows, _ = dustin(pair.target, pair.M, PROMPTS)
    finally:
        pair.target.eval()
    assert rows == expected_rows(pair.target) and "call model.eval() first" in caplog.text


def test_prefix_allowed_tokens(pair):
    """The function is asked about real prefixes only, with the row's own index, and obeyed at every position."""
    seen = []

    def allowed(batch_id, sent):
        seen.append((batch_id, sent.tolist()))
        return [(int(sent[-1]) * k + batch_id) % 150 + 5 for k in (3, 5, 11)]

    options = {"prefix_allowed_tokens_fn": allowed, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        expected = pair.target.generate(**left_pad(PROMPTS), max_new_tokens=24, do_sample=False, **options)
    stock_seen, seen[:] = list(seen), []
    rows, out = dustin(pair.target, pair.M, PROMPTS, **options)
    assert torch.equal(out.sequences, expected)
    real = {(b, tuple(text)) for b, text in stock_seen}
    assert real <= {(b, tuple(text)) for b, text in seen}
    for batch_id, text in seen:  # every text begins with the row's own prompt
        prompt = [0] * (30 - len(PROMPTS[batch_id])) + PROMPTS[batch_id]
        assert text[:30] == prompt and 30 <= len(text) < 54


def test_prefix_allowed_tokens_over_a_trie(pair):
    """A draft that the answer before it rules out, or that ends the row, leads to no further question."""
    answers = [[20, 21, 22, 23, 2], [20, 25, 26, 27, 2], [40, 41, 42, 43, 2]]

    def allowed(batch_id, text):
        said = text.tolist()[12:]
        return sorted({answer[len(said)] for answer in answers if answer[: len(said)] == said and said != answer})

    def as_tensor(batch_id, text):
        return torch.tensor(allowed(batch_id, text))

    for function in (allowed, as_tensor):
        options = {"prefix_allowed_tokens_fn": function, "eos_token_id": 2, "pad_token_id": 0}
        expected = plain(pair.target, PROMPTS[0], **options)
        assert expected in answers
        for draft in (pair.S, pair.M, pair.D, pair.target):
            rows, _ = dustin(pair.target, draft, PROMPTS[:1], **options)
            assert rows == [expected]


def test_prefix_allowed_tokens_of_several_sequences(pair):
    """With return sequences the index is what stock passes: of the prompt, before 5.24 of the row."""
    seen = set()

    def allowed(batch_id, sent):
        seen.add(batch_id)
        return [20 + batch_id, 40 + batch_id]

    options = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": allowed}
    pair.target.generate(**left_pad(PROMPTS), **options, max_new_tokens=8)
    stock_seen, seen = set(seen), set()
    rows, _ = dustin(pair.target, pair.M, PROMPTS, **options, new=8)
    assert seen == stock_seen
    for i, row in enumerate(rows):
        index = i // 2 if len(seen) == 3 else i
        assert set(row) <= {20 + index, 40 + index}


def test_empty_constraint(pair):
    with pytest.raises(ValueError, match="returned an empty list for batch ID"):
        dustin(pair.target, pair.M, PROMPTS, prefix_allowed_tokens_fn=lambda batch_id, sent: [])


def test_forced_tokens(pair):
    options = {"forced_eos_token_id": 2, "bad_words_ids": [[20], [30, 31]], "sequence_bias": [[[17], 4.0]]}
    rows, _ = dustin(pair.target, pair.M, PROMPTS, **options, new=9)
    assert rows == expected_rows(pair.target, new=9, **options)
    assert all(2 in row for row in rows)


class PerRow(LogitsProcessor):
    """Guidance with data of each row: what stock calls with row indices of the batch must see the same here."""

    def __init__(self, boosts):
        self.boosts = boosts

    def __call__(self, input_ids, scores):
        assert len(input_ids) == len(self.boosts)
        scores = scores.clone()
        for row, boost in enumerate(self.boosts):
            scores[row, (int(input_ids[row].sum()) * boost) % 160] += 6.0
        return scores


def test_guidance_by_row(pair):
    options = {"eos_token_id": None, "pad_token_id": 0}
    expected = pair.target.generate(
        **left_pad(PROMPTS),
        logits_processor=LogitsProcessorList([PerRow([3, 5, 7])]),
        max_new_tokens=24,
        do_sample=False,
        **options,
    )
    _, out = dustin(pair.target, pair.M, PROMPTS, logits_processor=LogitsProcessorList([PerRow([3, 5, 7])]), **options)
    assert torch.equal(out.sequences, expected)


def test_right_padding_p09(pair, recwarn):
    """P-09: pads on the right are refused; a last token that happens to be the pad id is not a pad."""
    prompts = [[5, 6, 0], [7, 8, 9]]
    rows, _ = dustin(pair.target, pair.M, prompts, new=6)
    assert rows == padded([plain(pair.target, p, new=6) for p in prompts], len(rows[0]))
    with dustin_hf.enable(pair.target), pytest.raises(ValueError, match="pad on the left"):
        pair.target.generate(
            input_ids=torch.tensor([[5, 6, 7, 0], [5, 6, 7, 8]]),
            attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
            assistant_model=pair.M,
            cache_implementation="dustin",
            max_new_tokens=3,
        )


def test_compiled_forward_p60(pair, monkeypatch):
    """P-60: a user's torch.compile of the forward; outputs of earlier steps stay what they were."""
    torch._dynamo.reset()
    for model in (pair.target, pair.M):
        monkeypatch.setattr(model, "forward", torch.compile(model.forward, backend="eager"), raising=False)
    kept = []
    hook = pair.target.lm_head.register_forward_hook(lambda module, args, out: kept.append((out, out.clone())))
    try:
        for gamma, prompts in ((2, PROMPTS), (4, PROMPTS[:2])):
            rows, _ = dustin(pair.target, pair.M, prompts, gamma=gamma, new=10)
            monkeypatch.undo()
            expected = [plain(pair.target, prompt, new=10) for prompt in prompts]
            assert rows == padded(expected, max(map(len, expected)))
    finally:
        hook.remove()
        torch._dynamo.reset()
    assert all(torch.equal(out, clone) for out, clone in kept)


def test_compile_config_p60(pair):
    """P-60: the host compiles for compileable caches only; ours is not one, so the option changes nothing."""
    from transformers import CompileConfig

    rows, _ = dustin(pair.target, pair.M, PROMPTS, compile_config=CompileConfig(mode="reduce-overhead"))
    assert rows == expected_rows(pair.target)


def test_compiled_assistants_and_narrow_ids(pair):
    """What has no length is no reason to doubt that it is there; ids of another width are ids."""
    rows, out = dustin(pair.target, torch.compile(pair.M, backend="eager"), PROMPTS)
    assert rows == expected_rows(pair.target) and out.sequences.is_contiguous()
    with dustin_hf.enable(pair.target):
        narrow = {name: x.int() for name, x in left_pad(PROMPTS).items()}
        options = {"assistant_model": pair.M, "cache_implementation": "dustin", "do_sample": False}
        out = pair.target.generate(**narrow, **options, max_new_tokens=24)
    assert out[:, 30:].tolist() == rows


def test_options_as_objects(pair, tmp_path):
    profile = DustinProfile.default(pair.target.config, pair.M.config)
    profile.save_pretrained(tmp_path)
    with dustin_hf.enable(pair.target, profile=tmp_path):
        out = pair.target.generate(
            **left_pad(PROMPTS),
            assistant_model=pair.M,
            cache_implementation="dustin",
            cache_config=DustinConfig(budget=99),
            max_new_tokens=5,
            return_dict_in_generate=True,
        )
    assert out.stats.options["budget"] == 99


def test_a_custom_method_keeps_the_profile_of_the_user(pair):
    profile = replace(DustinProfile.default(pair.target.config, pair.M.config), num_assistant_tokens=2)
    options = {"custom_generate": str(METHOD), "trust_remote_code": True, "assistant_model": pair.M}
    with dustin_hf.enable(pair.target, profile=profile):
        out = pair.target.generate(**left_pad(PROMPTS), **options, max_new_tokens=5, return_dict_in_generate=True)
    assert out.stats.num_assistant_tokens == 2


def test_processors_that_leave_a_draft_nothing(pair):
    """The target knows more ids than the draft: any draft is as good as another then."""
    target, draft = tiny_model("llama", vocab_size=168), tiny_model("llama", 1, vocab_size=160)
    torch.manual_seed(0)
    rows, _ = dustin(target, draft, PROMPTS, do_sample=True, suppress_tokens=list(range(160)), eos_token_id=None)
    assert all(160 <= token < 168 for row in rows for token in row)


@pytest.mark.parametrize("pad", [-1, 160])
def test_lookup_with_a_pad_that_is_no_id(pair, pad):
    with dustin_hf.enable(pair.target):
        out = pair.target.generate(
            **left_pad(PROMPTS[:1]),
            prompt_lookup_num_tokens=3,
            cache_implementation="dustin",
            pad_token_id=pad,
            eos_token_id=None,
            max_new_tokens=24,
            do_sample=False,
        )
    assert out[0, 12:].tolist() == plain(pair.target, PROMPTS[0], eos_token_id=None)
