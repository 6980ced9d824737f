"""enable and disable: everything as before afterwards, also after errors; nothing but calls for "dustin" changes."""

import copy
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import dustin, padded, plain
from transformers import AttentionInterface, GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface

import dustin_hf
from dustin_hf import DustinProfile
from dustin_hf.generation import DustinGenerationMixin
from dustin_hf.testing import left_pad, random_prompts, tiny_model

PROMPTS = random_prompts([12, 30])


def host_state():
    return (
        GenerationMixin.generate,
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS,
        sorted(AttentionInterface._global_mapping),
        sorted(AttentionMaskInterface._global_mapping),
    )


def model_state(model):
    return (
        type(model),
        model.config._attn_implementation,
        model.config.to_dict(),
        model.generation_config.to_dict(),
        sorted(vars(model)),
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
    )


def generate(model, draft, **kwargs):
    kwargs = {"do_sample": False, "max_new_tokens": 12, **kwargs}
    return model.generate(**left_pad(PROMPTS), assistant_model=draft, cache_implementation="dustin", **kwargs)


def new_rows(out):
    return out[:, 30:].tolist()


@pytest.fixture
def expected(pair):
    rows = [plain(pair.target, prompt, new=12) for prompt in PROMPTS]
    return padded(rows, max(map(len, rows)))


def test_enable_and_remove(pair, expected):
    before = host_state(), model_state(pair.target), model_state(pair.M)
    handle = dustin_hf.enable(pair.target)
    assert isinstance(pair.target, DustinGenerationMixin) and host_state() != before[0]
    assert new_rows(generate(pair.target, pair.M)) == expected
    handle.remove()
    handle.remove()
    assert (host_state(), model_state(pair.target), model_state(pair.M)) == before
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(pair.target, pair.M)


def test_context_manager(pair):
    before = host_state(), model_state(pair.target)
    with pytest.raises(ZeroDivisionError), dustin_hf.enable(pair.target):
        raise ZeroDivisionError
    assert (host_state(), model_state(pair.target)) == before


def test_other_calls_of_an_enabled_model_are_stock(pair):
    prompt = PROMPTS[0]
    inputs = {"input_ids": torch.tensor([prompt]), "max_new_tokens": 12, "do_sample": False}
    before = [pair.target.generate(**inputs), pair.target.generate(**inputs, assistant_model=pair.M)]
    with dustin_hf.enable(pair.target):
        after = [pair.target.generate(**inputs), pair.target.generate(**inputs, assistant_model=pair.M)]
        static = pair.target.generate(**inputs, cache_implementation="static")
        with pytest.raises(ValueError, match="batch_size = 1"):
            pair.target.generate(**left_pad(PROMPTS), assistant_model=pair.M, max_new_tokens=3)
    assert all(torch.equal(a, b) for a, b in zip(before, after)) and torch.equal(before[0], static)


def test_nested_profiles(pair):
    """The newest profile counts until its handle is removed; handles may be removed in any order."""
    one = DustinProfile(target_heads={0: (0,)}, draft_heads={0: (0,)}, num_assistant_tokens=1)
    three = DustinProfile(target_heads={1: (0,)}, draft_heads={1: (0,)}, num_assistant_tokens=3)

    def gamma():
        return generate(pair.target, pair.M, return_dict_in_generate=True).stats.num_assistant_tokens

    outer, inner = dustin_hf.enable(pair.target, profile=one), dustin_hf.enable(pair.target, profile=three)
    assert gamma() == 3
    inner.remove()
    assert gamma() == 1
    again = dustin_hf.enable(pair.target, profile=three)
    outer.remove()
    assert gamma() == 3
    again.remove()
    assert not isinstance(pair.target, DustinGenerationMixin)


def test_disable_a_model(pair):
    before = host_state()
    handles = [dustin_hf.enable(pair.target), dustin_hf.enable(pair.target), dustin_hf.enable(pair.D)]
    dustin_hf.disable(pair.target)
    assert not isinstance(pair.target, DustinGenerationMixin) and isinstance(pair.D, DustinGenerationMixin)
    dustin_hf.disable(pair.D)
    for handle in handles:
        handle.remove()
    assert host_state() == before


def test_global_enable(pair, expected):
    before = host_state(), model_state(pair.target)
    handle = dustin_hf.enable()
    assert new_rows(generate(pair.target, pair.M)) == expected
    assert type(pair.D) is before[1][0], "a model that was not called is not touched"
    with dustin_hf.enable(pair.target):
        assert new_rows(generate(pair.target, pair.M)) == expected
    assert new_rows(generate(pair.target, pair.M)) == expected
    handle.remove()
    assert (host_state(), model_state(pair.target)) == before
    dustin_hf.enable()
    generate(pair.target, pair.M)
    dustin_hf.disable()
    assert (host_state(), model_state(pair.target)) == before


def test_another_model_is_told_to_be_enabled(pair):
    """Only one model is enabled; "dustin" on another one must not become a dynamic cache in silence."""
    with dustin_hf.enable(pair.target), pytest.raises(ValueError, match=r"dustin_hf.enable\(model\)"):
        pair.D.generate(**left_pad(PROMPTS), cache_implementation="dustin", max_new_tokens=3)


def test_save_pretrained_writes_the_models_own_class(pair, tmp_path):
    with dustin_hf.enable(pair.target):
        assert type(pair.target).__name__ in ("Qwen2ForCausalLM", "LlamaForCausalLM")
        pair.target.save_pretrained(tmp_path)
    assert pair.target.config.architectures == [type(pair.target).__name__]
    assert type(pair.target).from_pretrained(tmp_path).config.architectures == [type(pair.target).__name__]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_and_pickles_are_of_the_original_class(pair, make):
    original = type(pair.target)
    with dustin_hf.enable(pair.target):
        clone = make(pair.target)
    assert type(clone) is original
    assert plain(clone, PROMPTS[0]) == plain(pair.target, PROMPTS[0])


class BoomError(Exception):
    pass


def raising(kind, error):
    """Keyword arguments of generate that raise in round 3."""
    calls = []

    def bump(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return args[1] if kind == "processor" else torch.zeros(len(args[0]), dtype=torch.bool)

    if kind == "processor":
        return {"logits_processor": LogitsProcessorList([bump])}
    return {"stopping_criteria": StoppingCriteriaList([bump])}


@pytest.mark.parametrize("error", [BoomError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", ["processor", "criterion", "streamer"])
def test_model_is_left_as_found_after_an_error_p58(pair, expected, kind, error):
    """P-58: a processor, a criterion or a streamer raises in round 3; also Ctrl-C."""
    with dustin_hf.enable(pair.target):
        states = model_state(pair.target), model_state(pair.M)
        with pytest.raises(error):
            if kind == "streamer":

                class Streamer:
                    calls = 0

                    def put(self, value):
                        self.calls += 1
                        if self.calls == 3:
                            raise error

                    def end(self):
                        pass

                pair.target.generate(
                    input_ids=torch.tensor([PROMPTS[0]]),
                    assistant_model=pair.M,
                    cache_implementation="dustin",
                    streamer=Streamer(),
                    max_new_tokens=40,
                    eos_token_id=None,
                )
            else:
                generate(pair.target, pair.M, **raising(kind, error), eos_token_id=None, max_new_tokens=40)
        assert (model_state(pair.target), model_state(pair.M)) == states
        assert plain(pair.target, PROMPTS[0], new=12) == expected[0][: len(plain(pair.target, PROMPTS[0], new=12))]
        assert new_rows(generate(pair.target, pair.M)) == expected


def test_error_inside_a_patched_forward_p58(pair, expected):
    def broken(module, args):
        raise BoomError

    states = model_state(pair.target)
    hook = pair.M.model.layers[1].mlp.register_forward_pre_hook(broken)
    with dustin_hf.enable(pair.target):
        with pytest.raises(BoomError):
            generate(pair.target, pair.M)
        hook.remove()
        assert new_rows(generate(pair.target, pair.M)) == expected
    assert model_state(pair.target) == states


def test_attention_named_dustin_is_sdpa_elsewhere_p59(pair):
    """P-59: to and from the product's name; padding respected in plain generate under each."""
    inputs = {**left_pad(PROMPTS), "max_new_tokens": 12, "do_sample": False}
    with dustin_hf.enable(pair.target):
        results = []
        for name in ("sdpa", "dustin", "eager", "dustin", "sdpa"):
            pair.target.set_attn_implementation(name)
            results.append(pair.target.generate(**inputs).tolist())
            if name != "eager":
                out = dustin(pair.target, pair.M, PROMPTS, new=12)[0]
                assert out == [row[30:] for row in results[0]]
        assert all(result == results[0] for result in results)


@pytest.mark.parametrize("where", ["keyword", "config", "model config"])
def test_ways_to_ask_p62(pair, expected, where, tmp_path):
    """P-62: as a keyword, in a GenerationConfig (saved and loaded), in the model's own."""
    inputs = {**left_pad(PROMPTS), "assistant_model": pair.M}
    with dustin_hf.enable(pair.target):
        options = {"cache_implementation": "dustin", "cache_config": {"budget": 999}, "max_new_tokens": 12}
        if where == "keyword":
            out = pair.target.generate(**inputs, **options, do_sample=False)
        elif where == "config":
            GenerationConfig(**options, do_sample=False, eos_token_id=2, pad_token_id=0).save_pretrained(tmp_path)
            config = GenerationConfig.from_pretrained(tmp_path)
            assert config.cache_implementation == "dustin" and config.cache_config == {"budget": 999}
            out = pair.target.generate(**inputs, generation_config=config)
        else:
            saved = copy.deepcopy(pair.target.generation_config)
            try:
                pair.target.generation_config.update(**options, do_sample=False)
                out = pair.target.generate(**inputs)
            finally:
                pair.target.generation_config = saved
    assert new_rows(out) == expected


def test_a_process_without_the_package_gets_stocks_error_p62(tmp_path):
    model = tiny_model()
    with dustin_hf.enable(model):
        GenerationConfig(cache_implementation="dustin").save_pretrained(tmp_path)
    code = f"from transformers import GenerationConfig; GenerationConfig.from_pretrained({str(tmp_path)!r})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode and "Invalid `cache_implementation` (dustin)" in run.stderr


def test_gamma_is_resolved_in_order(pair):
    profile = DustinProfile(target_heads={0: (0,)}, draft_heads={0: (0,)}, num_assistant_tokens=5)

    def gamma(profile=None, **kwargs):
        with dustin_hf.enable(pair.target, profile=profile):
            out = generate(pair.target, pair.M, return_dict_in_generate=True, **kwargs)
        return out.stats.num_assistant_tokens

    assert gamma() == 4
    pair.M.generation_config.num_assistant_tokens = 6
    try:
        assert gamma() == 6
        assert gamma(profile) == 5
        assert gamma(profile, cache_config={"num_assistant_tokens": 2}) == 2
        assert gamma(profile, cache_config={"num_assistant_tokens": 2}, num_assistant_tokens=3) == 3
        config = GenerationConfig(num_assistant_tokens=7, max_new_tokens=12, eos_token_id=2, pad_token_id=0)
        with dustin_hf.enable(pair.target, profile=profile):
            config.cache_implementation = "dustin"
            config.return_dict_in_generate = True
            out = pair.target.generate(**left_pad(PROMPTS), assistant_model=pair.M, generation_config=config)
        assert out.stats.num_assistant_tokens == 7
    finally:
        pair.M.generation_config.num_assistant_tokens = None


def test_a_call_leaves_both_configs_alone_p36(pair):
    before = pair.target.generation_config.to_dict(), pair.M.generation_config.to_dict()
    dustin(pair.target, pair.M, PROMPTS, gamma=3)
    assert (pair.target.generation_config.to_dict(), pair.M.generation_config.to_dict()) == before


def test_importing_has_no_side_effects():
    code = (
        "import sys, dustin_hf; "
        "assert 'triton' not in sys.modules and 'transformers' not in sys.modules; "
        "dustin_hf.enable, dustin_hf.DustinCache; "
        "from transformers import AttentionInterface; "
        "assert 'dustin' not in AttentionInterface._global_mapping; "
        # transformers imports triton by itself where it finds it; ours are imported on a GPU only
        "assert not [m for m in sys.modules if m.startswith('dustin_hf.kernels') and m.endswith('.kernel')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_warning_of_ours_p61(pair, recwarn):
    """P-61: warnings are errors in this suite; the cache is found under the host's name."""
    _, out = dustin(pair.target, pair.M, PROMPTS)
    assert isinstance(out.get("cache", out.get("past_key_values")), dustin_hf.DustinCache)
    assert not [w for w in recwarn if issubclass(w.category, FutureWarning)]


def test_what_others_set_meanwhile_stays(pair, monkeypatch):
    before = GenerationMixin.generate
    handle = dustin_hf.enable(pair.target)
    guard = GenerationMixin.generate

    def wrapped(*args, **kwargs):
        return guard(*args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "generate", wrapped)
    handle.remove()
    assert GenerationMixin.generate is wrapped
    monkeypatch.undo()
    GenerationMixin.generate = before
    assert plain(pair.target, PROMPTS[0], new=4) == plain(pair.target, PROMPTS[0], new=4)
