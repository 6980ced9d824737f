"""Bad input: an error that names the argument, what was expected, what came and what to do; nothing half-done stays."""

import pytest
import torch
from helpers import plain
from test_enabling import host_state, model_state
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration, TextStreamer

import dustin_hf
from dustin_hf import DustinProfile, UnsupportedModelError
from dustin_hf.generation import DustinGenerationMixin
from dustin_hf.profile import config_hash
from dustin_hf.testing import left_pad, random_prompts, tiny_model

PROMPTS = random_prompts([5, 12])
ROPE = {"rope_theta": 10000.0, "factor": 4.0}


def ids(*shape):
    return torch.full(shape, 5, dtype=torch.long)


def mask(*rows):
    return torch.tensor(rows)


class Tokenizer:
    def __init__(self, *words):
        self.words = words

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


# id -> (changes of the call, what the error says); the target is enabled, the draft is M
CALLS = {
    "beams": ({"num_beams": 2}, "greedily or by sampling"),
    "beams sampled": ({"num_beams": 2, "do_sample": True}, "leave out `num_beams`"),
    "no draft": ({"assistant_model": None}, "`assistant_model` is needed"),
    "no cache": ({"use_cache": False}, "`use_cache=False`"),
    "embeddings p63": ({"input_ids": None, "inputs_embeds": torch.randn(2, 5, 64)}, "`inputs_embeds`"),
    "embeddings and ids p63": ({"inputs_embeds": torch.randn(2, 12, 64)}, "`inputs_embeds`"),
    "empty prompt p64": ({"input_ids": ids(1, 0), "attention_mask": None}, r"`input_ids` must .* got shape \(1, 0\)"),
    "empty prompts p64": ({"input_ids": ids(2, 0), "attention_mask": None}, r"got shape \(2, 0\)"),
    "no rows p64": ({"input_ids": ids(0, 5), "attention_mask": None}, r"got shape \(0, 5\)"),
    "empty row p64": (
        {"input_ids": ids(2, 3), "attention_mask": mask([0, 0, 0], [1, 1, 1])},
        r"no token in rows \[0\]",
    ),
    "right pads": (
        {"input_ids": ids(2, 3), "attention_mask": mask([1, 1, 0], [1, 1, 1])},
        r"rows \[0\] .* on the left",
    ),
    "holes": ({"input_ids": ids(2, 3), "attention_mask": mask([1, 1, 1], [1, 0, 1])}, r"rows \[1\] .* without holes"),
    "mask shape": ({"input_ids": ids(2, 3), "attention_mask": mask([1, 1], [1, 1])}, "`attention_mask` must have"),
    "positions": ({"position_ids": torch.arange(12).expand(2, -1) + 3}, "`position_ids` must count"),
    "unknown option": ({"cache_config": {"budgt": 64}}, r"unknown keys \['budgt'\].*'budget', 'sinks'"),
    "budget": ({"cache_config": {"budget": 20}}, r"`budget` must be at least sinks \+ window \+ 1 = 21, got 20"),
    "negative sinks": ({"cache_config": {"sinks": -1}}, "`sinks` must be a non-negative integer, got -1"),
    "share": ({"cache_config": {"draft_share": 1.5}}, "`draft_share` must be between 0 and 1, got 1.5"),
    "mode": ({"cache_config": {"mode": "best"}}, r"`mode` must be one of .*'hybrid'.*got 'best'"),
    "backend": ({"cache_config": {"backend": "fast"}}, "`backend` must be one of"),
    "graph": (
        {"cache_config": {"backend": "graph"}},
        "`backend='graph'` cannot be had here: not all weights are on CUDA",
    ),
    "sparse drafts": (
        {"cache_config": {"draft_cache": "sparse", "mode": "target"}},
        "`draft_cache='sparse'` follows the draft's scores, which mode 'target' does not make",
    ),
    "draft cache": ({"cache_config": {"draft_cache": "none"}}, "`draft_cache` must be one of"),
    "gamma": ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must be a positive integer, got 0"),
    "n-grams": ({"max_matching_ngram_size": -1, "prompt_lookup_num_tokens": 2}, "`max_matching_ngram_size` must be"),
    "prefill chunk": ({"prefill_chunk_size": -1}, "`prefill_chunk_size` must be a positive integer, got -1"),
    "no prefill chunk": ({"prefill_chunk_size": 0}, "`prefill_chunk_size` must be a positive integer, got 0"),
    "options as a list": ({"cache_config": [1]}, "`cache_config` must be a dict or a DustinConfig, got list"),
    "share as text": ({"cache_config": {"draft_share": "x"}}, "`draft_share` must be between 0 and 1, got 'x'"),
    "draft as text": ({"assistant_model": "x"}, "`assistant_model` must be a transformers model, got str"),
    "own decoding": ({"custom_generate": lambda *args, **kwargs: None}, "`custom_generate` is a function"),
    "causality": ({"is_causal": False}, r"over `input_ids` alone, got \['is_causal'\] too"),
    "gamma as option": ({"cache_config": {"num_assistant_tokens": 2.5}}, "positive integer, got 2.5"),
    "healing": ({"token_healing": True, "tokenizer": Tokenizer("a", "b")}, "`token_healing=True` with 'dustin' is not"),
    "schedule": ({"num_assistant_tokens_schedule": "heuristic"}, "use 'constant'"),
    "guidance": ({"guidance_scale": 1.5}, "leave out `guidance_scale`"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "`assistant_ensemble_weight=0.5`"),
    "attentions p17": ({"return_dict_in_generate": True, "output_attentions": True}, "`output_attentions=True`"),
    "hidden p17": ({"return_dict_in_generate": True, "output_hidden_states": True}, "`output_hidden_states=True`"),
    "synced gpus p57": ({"synced_gpus": True}, "`synced_gpus=True`"),
    "capacity": ({"max_new_tokens": 10**10}, r"KV caches need [\d,]+ bytes, but cpu has [\d,]+ free"),
    "two tokenizers": (
        {"tokenizer": Tokenizer("a", "b"), "assistant_tokenizer": Tokenizer("b", "a")},
        "must share one tokenizer",
    ),
    "one tokenizer": ({"assistant_tokenizer": Tokenizer("a", "b")}, "`tokenizer` must be a tokenizer .*, got NoneType"),
    "no tokenizer": (
        {"tokenizer": Tokenizer("a", "b"), "assistant_tokenizer": "b"},
        "`assistant_tokenizer` must be a tokenizer where .*, got str",
    ),
}


@pytest.mark.parametrize("changes, message", CALLS.values(), ids=CALLS)
def test_bad_calls(pair, changes, message):
    forwards = []
    states = host_state(), model_state(pair.target), model_state(pair.M)
    hook = pair.target.model.register_forward_pre_hook(lambda *args: forwards.append(args))
    with dustin_hf.enable(pair.target):
        call = {
            **left_pad(PROMPTS),
            "assistant_model": pair.M,
            "cache_implementation": "dustin",
            "max_new_tokens": 4,
            **changes,
        }
        with pytest.raises(ValueError, match=message):
            pair.target.generate(**{k: v for k, v in call.items() if v is not None})
        assert not forwards, "the error comes before any work"
        hook.remove()
        assert plain(pair.target, PROMPTS[0], new=3)
    assert (host_state(), model_state(pair.target), model_state(pair.M)) == states


def other_rope(**rope):
    return {"rope_parameters": {**ROPE, **rope}}


DRAFTS = {
    "another tokenizer p23": ({"vocab_size": 4096}, "more than padding apart"),
    "dynamic rope": (other_rope(rope_type="dynamic"), "`assistant_model` uses rope_type 'dynamic'"),
}


@pytest.mark.parametrize("overrides, message", DRAFTS.values(), ids=DRAFTS)
def test_bad_drafts(pair, family, overrides, message):
    with dustin_hf.enable(pair.target), pytest.raises(ValueError, match=message):
        pair.target.generate(
            **left_pad(PROMPTS),
            assistant_model=tiny_model(family, 1, **overrides),
            cache_implementation="dustin",
            max_new_tokens=4,
        )


def test_a_draft_without_a_head(pair):
    with (
        dustin_hf.enable(pair.target),
        pytest.raises(ValueError, match="Model: load it with AutoModelForCausalLM"),
    ):
        pair.target.generate(
            **left_pad(PROMPTS), assistant_model=pair.M.model, cache_implementation="dustin", max_new_tokens=4
        )


def test_unsupported_draft(pair):
    draft = GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=32, n_layer=1, n_head=2))
    with dustin_hf.enable(pair.target), pytest.raises(UnsupportedModelError, match="`assistant_model` has .*'gpt2'"):
        pair.target.generate(
            **left_pad(PROMPTS), assistant_model=draft, cache_implementation="dustin", max_new_tokens=4
        )


def test_unsupported_targets():
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=160, n_embd=32, n_layer=1, n_head=2))
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=160, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    states = host_state()
    for model, name in ((gpt2, "gpt2"), (t5, "t5")):
        with pytest.raises(UnsupportedModelError, match=rf"'{name}'.*\['llama', 'mistral', 'qwen2', 'qwen3'\]"):
            dustin_hf.enable(model)
    with pytest.raises(ValueError, match="`model` must be a transformers model"):
        dustin_hf.enable(torch.nn.Linear(2, 2))
    assert host_state() == states
    dustin_hf.enable()
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        gpt2.generate(ids(1, 3), assistant_model=gpt2, cache_implementation="dustin", max_new_tokens=3)


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, r"sliding-window .* layers \[1\]"),
        (other_rope(rope_type="dynamic"), "`model` uses rope_type 'dynamic'"),
    ],
)
def test_bad_targets(overrides, message):
    """P-27: a window on some layers is refused."""
    target = tiny_model("qwen2", **overrides)
    with dustin_hf.enable(target), pytest.raises(ValueError, match=message):
        target.generate(**left_pad(PROMPTS), assistant_model=target, cache_implementation="dustin", max_new_tokens=4)


def test_window_that_is_off_is_fine_p27():
    target = tiny_model("qwen2", use_sliding_window=False, sliding_window=16)
    with dustin_hf.enable(target):
        target.generate(**left_pad(PROMPTS), assistant_model=target, cache_implementation="dustin", max_new_tokens=4)


def test_profiles_of_another_pair(pair):
    heads = {"target_heads": {1: (0,)}, "draft_heads": {1: (0,)}}
    other = tiny_model(num_hidden_layers=3).config
    bad = {
        "another target: config hash": DustinProfile(**heads, target_hash=config_hash(other)),
        "another draft: config hash": DustinProfile(**heads, draft_hash=config_hash(other)),
        r"heads \(4,\) of target layer 1": DustinProfile(target_heads={1: (4,)}, draft_heads={1: (0,)}),
        r"heads \(0,\) of draft layer 2": DustinProfile(target_heads={1: (0,)}, draft_heads={2: (0,)}),
    }
    for message, profile in bad.items():
        of_target = "target" in message  # which is known before any call
        with pytest.raises(ValueError, match=message):
            with dustin_hf.enable(pair.target, profile=profile):
                assert not of_target
                pair.target.generate(
                    **left_pad(PROMPTS), assistant_model=pair.M, cache_implementation="dustin", max_new_tokens=4
                )
        assert not isinstance(pair.target, DustinGenerationMixin)
    good = DustinProfile(**heads, target_hash=config_hash(pair.target.config), draft_hash=config_hash(pair.M.config))
    with dustin_hf.enable(pair.target, profile=good):
        pair.target.generate(
            **left_pad(PROMPTS), assistant_model=pair.M, cache_implementation="dustin", max_new_tokens=4
        )


def test_bad_profiles():
    with pytest.raises(ValueError, match="`profile` belongs to one pair"):
        dustin_hf.enable(profile=DustinProfile({0: (0,)}, {0: (0,)}))
    with pytest.raises(ValueError, match="`profile` must be a DustinProfile"):
        dustin_hf.enable(tiny_model(), profile=3)


def test_stock_streamer_refuses_a_batch_itself_p16(pair):
    with dustin_hf.enable(pair.target), pytest.raises(ValueError, match="batch size 1"):
        pair.target.generate(
            **left_pad(PROMPTS),
            assistant_model=pair.M,
            cache_implementation="dustin",
            streamer=TextStreamer(None),
            max_new_tokens=3,
        )


class RecordingStreamer:
    def __init__(self):
        self.values, self.ends = [], 0

    def put(self, value):
        self.values.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.mark.parametrize("kind", ["S", "M", "self"])
def test_streamer_of_one_row_p16(pair, kind):
    streamer = RecordingStreamer()
    with dustin_hf.enable(pair.target):
        out = pair.target.generate(
            input_ids=torch.tensor([PROMPTS[0]]),
            assistant_model=pair.drafts[kind],
            cache_implementation="dustin",
            streamer=streamer,
            max_new_tokens=20,
            do_sample=False,
        )
    assert streamer.values[0] == [PROMPTS[0]] and streamer.ends == 1
    assert [token for value in streamer.values[1:] for token in value] == out[0, len(PROMPTS[0]) :].tolist()


@pytest.mark.parametrize("call", ["one token", "tokens of one and fifty", "from bos"])
def test_short_prompts_p64(pair, call):
    prompts = {"one token": [[9], [11]], "tokens of one and fifty": random_prompts([1, 50]), "from bos": [[1]]}[call]
    inputs = {} if call == "from bos" else left_pad(prompts)
    with dustin_hf.enable(pair.target):
        out = pair.target.generate(
            **inputs, assistant_model=pair.M, cache_implementation="dustin", max_new_tokens=12, do_sample=False
        )
    width = max(map(len, prompts))
    for row, prompt in zip(out[:, width:].tolist(), prompts):
        expected = plain(pair.target, prompt, new=12)
        assert row[: len(expected)] == expected


def test_rows_of_logits_p65(pair):
    """P-65: prefill computes no logits at all, verification gamma + 1 positions of each row."""
    rows = []
    hook = pair.target.lm_head.register_forward_hook(lambda module, args, out: rows.append(tuple(out.shape[:2])))
    with dustin_hf.enable(pair.target):
        out = pair.target.generate(
            **left_pad(random_prompts([3000, 7])),
            assistant_model=pair.M,
            cache_implementation="dustin",
            num_assistant_tokens=4,
            max_new_tokens=12,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
    hook.remove()
    assert len(rows) == out.stats.target_calls
    assert set(rows) <= {(2, n) for n in range(1, 6)} and rows[0] == (2, 5)


def test_pixels_are_not_lost():
    """Models around a supported one have inputs that blocks of its tokens would lack."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    text = tiny_model("llama").config.to_dict()
    text.pop("transformers_version", None)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=16, patch_size=8).to_dict()
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=150)
    ).eval()
    call = {"input_ids": torch.tensor([[5, 150, 150, 150, 150, 9]]), "pixel_values": torch.randn(1, 3, 16, 16)}
    call |= {"assistant_model": tiny_model("llama", 1), "cache_implementation": "dustin", "max_new_tokens": 4}
    with (
        dustin_hf.enable(model),
        pytest.raises(ValueError, match="alone, got .'pixel_values'. too: .* images"),
    ):
        model.generate(**call)


@pytest.mark.parametrize("kind", ["prompt tuning", "lora", "own"])
def test_inputs_that_are_rewritten(pair, monkeypatch, kind):
    """PEFT puts its own method on the model it wraps; only learned prompts, and others' methods, need it."""

    class Wrapper:
        active_peft_config = type("Config", (), {"is_prompt_learning": kind == "prompt tuning"})

        def prepare(self, *args, **kwargs):
            raise AssertionError

    prepare = Wrapper().prepare if kind != "own" else lambda *args, **kwargs: {}
    monkeypatch.setattr(pair.target, "prepare_inputs_for_generation", prepare, raising=False)
    call = {**left_pad(PROMPTS), "assistant_model": pair.M, "cache_implementation": "dustin", "max_new_tokens": 4}
    with dustin_hf.enable(pair.target):
        if kind == "lora":
            assert pair.target.generate(**call).shape[1] == 16
        else:
            with pytest.raises(ValueError, match="`prepare_inputs_for_generation` of the model is not that of"):
                pair.target.generate(**call)


@pytest.mark.parametrize("cut", ["model", "assistant_model"])
def test_models_of_fewer_layers_than_they_say(cut):
    target, draft = tiny_model(), tiny_model(seed=1)
    model = target if cut == "model" else draft
    model.model.layers = model.model.layers[:1]
    options = {"assistant_model": draft, "cache_implementation": "dustin", "max_new_tokens": 4, "do_sample": False}
    with dustin_hf.enable(target):
        with pytest.raises(ValueError, match=f"`{cut}` has 1 layers, its configuration says 2: set `config.num_hid"):
            target.generate(**left_pad(PROMPTS), **options)
        model.config.num_hidden_layers = 1
        assert target.generate(**left_pad(PROMPTS), **options).shape[1] > max(map(len, PROMPTS))
