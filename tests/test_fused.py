"""The fused forward and its kernels: equal to the models' own forwards; what it cannot run; the compiled backend."""

import pytest
import torch
from helpers import dustin, plain
from torch import nn

import dustin_hf
from dustin_hf import engine, generation
from dustin_hf.cache import DustinCache
from dustin_hf.drafting import ModelProposer, recent_slots
from dustin_hf.engine import Backend
from dustin_hf.forward import CompiledForward, StockForward
from dustin_hf.fused import FusedForward, fusion_obstacle
from dustin_hf.graphs import StepGraph, _copy
from dustin_hf.model_patches.attention import BlockAttention, block_attention
from dustin_hf.modules import has_hooks
from dustin_hf.selection import Selection
from dustin_hf.stats import Clock
from dustin_hf.step import speculative_step
from dustin_hf.testing import assert_close, left_pad, random_prompts, tiny_model

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPTS = random_prompts([9, 30, 5])


def lively(family, **overrides):
    """A model whose biases and norms do something."""
    model = tiny_model(family, **overrides)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or "bias" in name:
                p.add_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def blocks(forward, heads):
    """Logits, kept queries and cache of a dense block and two sparse ones, one row of them before its first slot."""
    cache, outs = DustinCache(2, 3, 64), []
    slots = torch.tensor([[3, 0, -1, 7], [-1, 1, 2, 19], [5, 4, 11, -1]], dtype=torch.int32)
    for start, new, indices, keep in (
        ([-1, 0, 0], 20, None, 0),
        ([19, 20, 20], 3, slots[None, :, None], 0),
        ([22, 21, 23], 1, slots[None, :, None], 1),
    ):
        attention = BlockAttention(torch.tensor(start), Selection(indices), heads)
        ids = (torch.arange(3 * new) % 150 + 3).view(3, new)
        logits = forward(cache, ids, attention, logits_to_keep=keep)
        # the token before a row's first slot sees nothing that counts
        outs += [logits[:, 1:] if new > 1 else logits, *(q[:, -1] for q in attention.queries.values())]
    outs += [x[:, :, :23] for layer in cache.layers for x in (layer.keys, layer.values)]
    return outs


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merging", [True, False])
@pytest.mark.parametrize("tapped", [{}, {1: (0, 2)}], ids=["plain", "tapped"])
def test_equals_the_models_own_forward(family, merging, tapped, monkeypatch):
    if not merging:
        monkeypatch.setattr("dustin_hf.fused.MERGE_BYTES", 0)
    model = lively(family)
    with dustin_hf.enable(model), block_attention(model):
        expected, got = blocks(StockForward(model), tapped), blocks(FusedForward(model, 64), tapped)
    for i, (x, y) in enumerate(zip(expected, got, strict=True)):
        assert_close(str(i), x, y)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_compiled_forward_equals_the_models_own(family, monkeypatch):
    """What torch.compile would make of it: traced whole, though not lowered here."""
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kwargs: compiled(f, backend="eager", fullgraph=True, **kwargs))
    model = lively(family)
    with dustin_hf.enable(model), block_attention(model):
        expected, got = blocks(StockForward(model), {1: (0,)}), blocks(CompiledForward(model), {1: (0,)})
    for i, (x, y) in enumerate(zip(expected, got, strict=True)):
        assert_close(str(i), x, y)


def test_a_forward_with_hidden_states_spoils_nothing():
    """Transformers leaves hooks behind, which do nothing in other forwards."""
    model = lively("llama")
    model(torch.tensor([[5, 6, 7]]), output_hidden_states=True, output_attentions=True)
    assert any(m._forward_hooks for m in model.modules())
    assert not has_hooks(model) and fusion_obstacle(model) is None
    model.model.layers[0].register_forward_hook(lambda module, args, out: out)
    assert has_hooks(model) and fusion_obstacle(model) == "modules have hooks"


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
@pytest.mark.parametrize("config", [{}, {"budget": 24}, {"budget": 24, "draft_cache": "sparse"}], ids=str)
def test_compiled_backend_gives_the_text_of_eager(pair, kind, config):
    rows = []
    for backend in ("eager", "compiled"):
        texts, out = dustin(pair.target, pair.drafts[kind], PROMPTS, config={**config, "backend": backend}, new=40)
        rows.append(texts)
        assert (out.stats.backend, out.stats.backend_reason) == (backend, "asked for")
    assert rows[0] == rows[1]


@pytest.mark.parametrize("kind", ["S", "D", "M", "self"])
def test_sparse_drafts_change_no_text_at_full_budget(pair, kind):
    """Whatever drafts attend to, verification decides; a small draft budget is had by a large verification budget."""
    seen = []
    choose = ModelProposer._selection

    def small(self, start, view):
        self.kind, self.size, self.sinks, self.window = "sparse", 12, 1, 2
        selection = choose(self, start, view)
        seen.append(None if selection.indices is None else selection.indices.shape[-1])
        return selection

    ModelProposer._selection = small
    try:
        rows, _ = dustin(pair.target, pair.drafts[kind], PROMPTS, new=30, eos_token_id=None)
    finally:
        ModelProposer._selection = choose
    assert rows == [plain(pair.target, prompt, new=30, eos_token_id=None) for prompt in PROMPTS]
    assert None in seen and 12 + 2 * 4 in seen


def test_recent_slots():
    """What came after a sparse draft cache was chosen."""
    slots = recent_slots(torch.tensor([9, 5, 2]), torch.tensor([6, 5, 3]), 4)
    assert slots.tolist() == [[-1, 6, 7, 8], [-1, -1, -1, -1], [-1, -1, -1, -1]]


def test_what_cannot_be_fused():
    model = tiny_model("qwen2")
    assert fusion_obstacle(model) is None
    hook = model.lm_head.register_forward_hook(lambda module, args, out: out)
    assert fusion_obstacle(model) == "modules have hooks"
    hook.remove()
    model.model.layers[1].mlp.up_proj.forward = model.model.layers[1].mlp.up_proj.forward
    assert "changed" in fusion_obstacle(model)

    class Adapted(nn.Linear):
        pass

    model = tiny_model("qwen2")
    model.model.layers[0].mlp.down_proj = Adapted(128, 64, bias=False)
    assert fusion_obstacle(model) == "projections are not plain linear layers"
    assert fusion_obstacle(tiny_model("llama", attention_bias=True)) is not None
    assert fusion_obstacle(tiny_model("llama", hidden_act="gelu")) == "the activation is not silu"
    biased, other_norm, adapted = (tiny_model("qwen2") for _ in range(3))
    biased.lm_head = nn.Linear(64, 160)
    assert fusion_obstacle(biased) == "embeddings are not plain"
    other_norm.model.norm = nn.LayerNorm(64)
    assert fusion_obstacle(other_norm) == "norms are not root mean square norms"

    class Scaled(type(adapted.model.layers[1].mlp)):
        def forward(self, x):
            return 1.5 * super().forward(x)

    adapted.model.layers[1].mlp.__class__ = Scaled
    assert fusion_obstacle(adapted) == "Scaled is no module of transformers or torch"
    mixed = tiny_model("llama")
    mixed.lm_head.to(torch.float64)
    assert "several" in fusion_obstacle(mixed)


def test_a_model_that_changes_its_dtype():
    """Merged projections and rotary tables follow."""
    target, options = lively("qwen3"), {"cache_implementation": "dustin", "cache_config": {"backend": "compiled"}}
    with dustin_hf.enable(target):
        for dtype in (torch.float32, torch.float64, torch.float32):
            target.to(dtype)
            out = target.generate(
                **left_pad(PROMPTS), **options, assistant_model=target, max_new_tokens=12, do_sample=False
            )
            expected = [plain(target, prompt, new=12) for prompt in PROMPTS]
            rows = out[:, max(map(len, PROMPTS)) :].tolist()
            assert [row[: len(tokens)] for row, tokens in zip(rows, expected)] == expected


def test_weights_are_read_anew_in_each_call():
    """A change of the weights between two calls reaches the merged projections."""
    target = lively("qwen2")
    with dustin_hf.enable(target):
        options = {
            "assistant_model": target,
            "cache_implementation": "dustin",
            "cache_config": {"backend": "compiled"},
            "max_new_tokens": 20,
            "do_sample": False,
        }
        first = target.generate(**left_pad(PROMPTS), **options)
        with torch.no_grad():
            target.model.layers[0].self_attn.q_proj.weight.neg_()
            target.model.layers[0].self_attn.v_proj.bias.add_(1.0)
        second = target.generate(**left_pad(PROMPTS), **options)
    expected = [plain(target, prompt, new=20) for prompt in PROMPTS]
    width = max(map(len, PROMPTS))
    assert not torch.equal(first, second)
    for row, tokens in zip(second[:, width:].tolist(), expected):
        assert row[: len(tokens)] == tokens


def changed_activation(model):
    model.model.layers[1].mlp.act_fn = nn.GELU()


def changed_epsilon(model):
    model.model.layers[0].input_layernorm.variance_epsilon = 0.5


def changed_class(model, monkeypatch):
    kind = type(model.model.layers[0].mlp)
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.5 * own(self, x))


def changed_everywhere(model, monkeypatch):
    kind = type(model.model.layers[0].mlp)
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: 1.5 * out if isinstance(module, kind) else None
    )
    monkeypatch.setattr(model, "unhook", hook.remove, raising=False)


class Wrapped(torch.Tensor):
    """A weight of another kind in a plain linear layer, as quantisation leaves it."""


def changed_weight(model):
    linear = model.model.layers[0].self_attn.q_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Wrapped))


@pytest.mark.parametrize(
    "change, obstacle",
    [
        (changed_activation, "the activation is not silu"),
        (changed_epsilon, "norms have another epsilon than the configuration"),
        (changed_class, "classes of modules have another forward"),
        (changed_everywhere, "modules have hooks"),
        (changed_weight, "parameters are no plain tensors"),
    ],
)
def test_models_that_were_changed_run_as_they_are(change, obstacle, monkeypatch):
    target, draft = lively("qwen2"), tiny_model("qwen2", seed=3)
    expected = [plain(target, prompt, new=12) for prompt in PROMPTS]
    try:
        change(target, *([monkeypatch] if change.__code__.co_argcount > 1 else []))
        assert fusion_obstacle(target) == obstacle
        changed = [plain(target, prompt, new=12) for prompt in PROMPTS]
        assert (changed == expected) == (change is changed_weight)
        rows, _ = dustin(target, draft, PROMPTS, config={"backend": "compiled"}, new=12)
        assert rows == changed
    finally:
        getattr(target, "unhook", lambda: None)()


@pytest.mark.parametrize("change", ["module", "frequencies", "attention_scaling"])
def test_rotary_tables_are_made_anew_in_each_call(change):
    """Another scaling between two calls reaches the steps of the second."""
    target, other = lively("qwen2"), tiny_model("qwen2", rope_parameters={"rope_type": "linear", "factor": 4.0})
    options = {"assistant_model": target, "cache_implementation": "dustin", "cache_config": {"backend": "compiled"}}
    options |= {"max_new_tokens": 12, "do_sample": False}
    rotary = target.model.rotary_emb
    with dustin_hf.enable(target):
        first = target.generate(**left_pad(PROMPTS), **options)
        if change == "module":
            target.model.rotary_emb = other.model.rotary_emb
        elif change == "frequencies":
            rotary.inv_freq.mul_(0.5)
        else:
            rotary.attention_scaling = 1.5
        second = target.generate(**left_pad(PROMPTS), **options)
    assert not torch.equal(first, second)
    expected, width = [plain(target, prompt, new=12) for prompt in PROMPTS], max(map(len, PROMPTS))
    assert [row[: len(tokens)] for row, tokens in zip(second[:, width:].tolist(), expected)] == expected


class NotCaptured(StepGraph):
    """Runs its step anew instead of replaying it: what calls do with graphs, where there are none."""

    def __init__(self, parts, state, gamma, columns, pool):
        self.arguments = parts, gamma
        self.state, self.started_from, self.of_rows = _copy(state, columns), {}, []
        self.clock = Clock(state.sequences.device)
        self.replays = 0

    def replay(self):
        self.replays += 1
        parts, gamma = self.arguments
        return speculative_step(parts, self.state, gamma, None, self.clock)


def test_steps_of_a_call_find_their_graph(pair, monkeypatch):
    """Two steps as they are, then one graph for all others, whose key is made once and looked up once."""
    keys, graphs = [], []

    class Key(tuple):
        __slots__ = ()

        def __hash__(self):
            keys.append(self)
            return super().__hash__()

    monkeypatch.setattr(engine, "step_key", lambda *args: Key())
    monkeypatch.setattr(engine, "StepGraph", lambda *args: graphs.append(NotCaptured(*args)) or graphs[-1])
    monkeypatch.setattr(generation, "choose_backend", lambda *args: Backend("graph", "a test", whole=True))
    rows, out = dustin(pair.target, pair.M, PROMPTS, new=40, eos_token_id=None)
    assert rows == [plain(pair.target, prompt, new=40, eos_token_id=None) for prompt in PROMPTS]
    steps = out.stats.target_calls
    assert steps > 8 and [graph.replays for graph in graphs] == [0, steps - 2]
    assert len(keys) <= 8  # not in each step: it names every parameter
