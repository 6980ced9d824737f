"""Retrieval heads: rows against a loop, needles exact in ids, a head known to copy found first, interrupted runs."""

import gzip
import json
import math
import random

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import dustin_hf
from dustin_hf.cache import DustinCache
from dustin_hf.prefill import prefill
from dustin_hf.profiling.identify import best_heads, overlap, score_heads
from dustin_hf.profiling.needles import NeedleSample, needle_samples
from dustin_hf.profiling.rows import attention_rows, mass, tapped_block
from dustin_hf.testing import assert_close, random_prompts, tiny_model
from dustin_hf.texts import read_texts

VOCABULARY = 24
COPY = (1, 2)  # layer and head that copy in the toy
MATCH = 6.0  # its score of an equal token; others get 0
TEXTS = read_texts()


@pytest.fixture(scope="module")
def tokenizer():
    """Byte-level pieces as of Qwen and Llama 3, learnt from the package's own texts; with a BOS token."""
    learnt, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
    learnt.pre_tokenizer, learnt.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<s>"])
    learnt.train_from_iterator(TEXTS.values(), trainer)
    learnt.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=learnt, bos_token="<s>")


@pytest.fixture(scope="module")
def toy():
    """Layers that pass embeddings on; one head attends to earlier occurrences of its token, all others uniformly."""
    rope = {"rope_type": "default", "rope_theta": 1e30}
    model = tiny_model("llama", vocab_size=VOCABULARY, head_dim=64, num_hidden_layers=3, rope_parameters=rope)
    # of each head, dimensions 0..4 and their partners 32..36 may rotate; the others turn by less than 1e-4 a token
    content = [d for d in range(64) if d % 32 >= 5]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
        model.model.embed_tokens.weight[torch.arange(VOCABULARY), torch.arange(VOCABULARY)] = 1.0
        attention = model.model.layers[COPY[0]].self_attn
        head, kv_head = COPY[1], COPY[1] // 2
        # RMSNorm turns a one-hot row of 64 into 8 times it; the scale is 1/8
        weight = math.sqrt(MATCH / 8)
        for token, dimension in zip(range(VOCABULARY), content):
            attention.q_proj.weight[head * 64 + dimension, token] = weight
            attention.k_proj.weight[kv_head * 64 + dimension, token] = weight
    return model


def toy_sample(length, depth, seed):
    """The fact is made of tokens that occur elsewhere only once in a while; the answer repeats it."""
    rng = random.Random(seed)
    fact = rng.sample(range(12, 24), 6)
    prompt = [rng.randrange(16) for _ in range(length - 12)]
    at = int(depth * len(prompt))
    prompt[at:at] = fact
    return NeedleSample(tuple(prompt), tuple(fact), (at, at + 6), depth, length)


def toy_samples(lengths=(60, 90), seed=0):
    return [toy_sample(length, depth, seed + length) for length in lengths for depth in (0.1, 0.5, 0.9)]


def by_hand(sample):
    """What the copying head and a uniform one put on the fact."""
    tokens = sample.prompt_ids + sample.answer_ids
    begin, end = sample.span
    copying, uniform = [], []
    for position in range(len(sample.prompt_ids) - 1, len(tokens) - 1):
        weights = [math.exp(MATCH) if token == tokens[position] else 1.0 for token in tokens[: position + 1]]
        copying.append(sum(weights[begin:end]) / sum(weights))
        uniform.append((end - begin) / (position + 1))
    return sum(copying) / len(copying), sum(uniform) / len(uniform)


@pytest.mark.parametrize("q_heads, heads", [(6, 2), (3, 3), (7, 1)], ids=["grouped", "single", "one"])
@pytest.mark.parametrize("new, start", [(5, 9), (1, 4), (6, 0)])
def test_rows_equal_a_loop(q_heads, heads, new, start):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(new, q_heads, 8, generator=generator)
    keys = torch.randn(heads, 20, 8, generator=generator)
    keys[:, start + new :] = float("nan")  # stale slots
    rows = attention_rows(q, keys, start, 0.3)
    expected = torch.zeros(q_heads, new, start + new)
    for head in range(q_heads):
        for i in range(new):
            scores = [0.3 * float(q[i, head] @ keys[head // (q_heads // heads), t]) for t in range(start + i + 1)]
            total = sum(math.exp(score) for score in scores)
            expected[head, i, : start + i + 1] = torch.tensor([math.exp(score) / total for score in scores])
    assert rows.dtype == torch.float32
    assert_close("rows", expected, rows)
    assert_close("mass", expected[:, :, 1:3].sum(-1), mass(rows, 1, 3))
    half = attention_rows(q.bfloat16(), keys.bfloat16(), start, 0.3)
    assert torch.equal(half, attention_rows(q.bfloat16().float(), keys.bfloat16().float(), start, 0.3))


def test_errors_of_rows():
    with pytest.raises(ValueError, match="HQ a multiple of H"):
        attention_rows(torch.zeros(2, 3, 8), torch.zeros(2, 6, 8), 0, 1.0)
    with pytest.raises(ValueError, match="`start` must leave room for 2 queries among 6 slots"):
        attention_rows(torch.zeros(2, 2, 8), torch.zeros(2, 6, 8), 5, 1.0)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tapped_block_sees_what_the_model_attends_to(family):
    """Ragged rows: queries and keys give the rows that stock eager attention has, and the lengths stay."""
    model = tiny_model(family)
    prompts = random_prompts([30, 21])
    cache = DustinCache(2, 2, 40)
    padded = torch.tensor([prompts[0], [0] * 9 + prompts[1]])
    with dustin_hf.enable(model), torch.no_grad():
        prefill(model, cache, padded, [0, 9], [0, 0])
    block = torch.tensor(random_prompts([4, 4], seed=1))
    block[:, 0] = padded[:, -1]
    logits, queries = tapped_block(model, cache, block)
    assert cache.lengths.tolist() == [29, 20] and not hasattr(model, "_dustin_profiles")
    chosen = tapped_block(model, cache, block, heads={1: (3, 0)})[1]
    assert list(chosen) == [1] and torch.equal(chosen[1], queries[1][:, :, [3, 0]])
    assert tapped_block(model, cache, block, logits_to_keep=1)[0].shape == (2, 1, 160)
    model.set_attn_implementation("eager")
    for row, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + block[row, 1:].tolist()])
        with torch.no_grad():
            out = model(ids, output_attentions=True)
        assert_close("logits", out.logits[0, -4:], logits[row])
        for layer, attention in enumerate(out.attentions):
            rows = attention_rows(queries[layer][row], cache.layers[layer].keys[row], len(prompt) - 1, 16**-0.5)
            assert_close("rows", attention[0, :, -4:], rows)
    with pytest.raises(ValueError, match="does not fit the cache's capacity of 40"):
        tapped_block(model, cache, torch.zeros(2, 12, dtype=torch.long))


def test_the_head_that_copies_is_found_first(toy):
    samples, config = toy_samples(), toy.config.to_dict()
    scores = score_heads(toy, samples)
    copying, uniform = [sum(parts) / len(samples) for parts in zip(*map(by_hand, samples))]
    expected = torch.full((3, 4), uniform)
    expected[COPY] = copying
    assert (scores - expected).abs().max() < 1e-4 and copying > 3 * uniform
    assert divmod(int(scores.argmax()), 4) == COPY
    assert best_heads(scores, 1)[COPY[0]] == (COPY[1],)
    assert type(toy).__mro__[1].__name__ == "LlamaPreTrainedModel" and toy.config.to_dict() == config


def test_other_samples_find_the_same_heads(toy):
    first, second = (best_heads(score_heads(toy, toy_samples(*given)), 2) for given in (((60,), 1), ((120, 200), 2)))
    assert overlap(first, second) == 1.0


@pytest.mark.parametrize("depth", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("length", [300, 1000])
def test_needles_are_where_they_should_be(tokenizer, length, depth):
    for sample in needle_samples(TEXTS, tokenizer, [length], [depth], per_cell=2):
        (begin, end), ids = sample.span, sample.prompt_ids
        before, needle, after = map(tokenizer.decode, (ids[:begin], ids[begin:end], ids[end:]))
        assert needle == tokenizer.decode(sample.answer_ids)
        assert needle.startswith(" The ") and " keeps exactly " in needle and needle.endswith(".")
        assert len(ids) + len(sample.answer_ids) == length == sample.length
        assert ids.index(tokenizer.bos_token_id) == 0 and ids.count(tokenizer.bos_token_id) == 1
        text, question = after.split("\n\nQuestion: ")
        assert question.startswith("What does the ") and question.endswith("?\nAnswer:")
        assert question.split()[3] == needle.split()[1]  # the owner
        asked = len(tokenizer("\n\nQuestion: " + question, add_special_tokens=False)["input_ids"])
        room = length - 1 - asked - 2 * len(sample.answer_ids)
        assert abs(begin - 1 - depth * room) <= max(32, 0.05 * room) + 0.5
        # between two sentences, and the text ends with one
        assert depth == 0 or before.rstrip("\"'”’)]")[-1] in ".!?…"
        assert depth == 1 or text.rstrip("\"'”’)]")[-1] in ".!?…"


def test_needles_are_deterministic(tokenizer):
    cells = {"tokenizer": tokenizer, "lengths": [400, 600], "depths": [0.2, 0.8], "per_cell": 2}
    made = needle_samples(TEXTS, **cells, seed=3)
    assert made == needle_samples(dict(reversed(TEXTS.items())), **cells, seed=3)
    assert len({sample.digest for sample in made}) == len(made) == 8
    # a cell depends on itself only, and on the seed
    assert needle_samples(TEXTS, tokenizer, [600], [0.8], seed=3) == [made[6]]
    assert not set(made) & set(needle_samples(TEXTS, **cells, seed=4))


def test_short_texts_go_on_with_others(tokenizer):
    short = {name: f"{name.title()} sat here. " * 10 for name in ("ann", "bob", "cat", "dan")}
    (sample,) = needle_samples(short, tokenizer, [340], [0.5])
    said = tokenizer.decode(sample.prompt_ids)
    assert sum(name.title() in said for name in short) > 1


def test_tokenizers_without_offsets():
    class Slow:
        is_fast = False
        bos_token_id = None

        def __call__(self, text, **kwargs):
            return {"input_ids": [ord(character) for character in text]}

    (sample,) = needle_samples(TEXTS, Slow(), [1000], [0.25])
    (begin, end), said = sample.span, "".join(map(chr, sample.prompt_ids))
    assert said[begin:end] == "".join(map(chr, sample.answer_ids)) and said[begin:].startswith(" The ")
    assert begin == round(0.25 * (said.index("\n\nQuestion: ") - (end - begin)))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": [1000, 2000], "max_positions": 1024}, r"`lengths` \[1000, 2000\] go beyond .* limit of 1024"),
        ({"lengths": [100_000]}, r"`lengths` ask for \d+ tokens of running text, but `texts` \(4\) hold \d+"),
        ({"lengths": [20]}, "`lengths` must be above"),
        ({"lengths": []}, "ask for no sample"),
        ({"depths": [1.5]}, "`depths` must be between 0 and 1"),
    ],
)
def test_errors_of_needles(tokenizer, change, message):
    with pytest.raises(ValueError, match=message):
        needle_samples(**{"texts": TEXTS, "tokenizer": tokenizer, "lengths": [300], **change})


def test_texts_of_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    (tmp_path / "c.jsonl").write_text(json.dumps({"text": "three\u2028 and"}, ensure_ascii=False) + "\n\n", "utf-8")
    (tmp_path / "d.pdf").write_bytes(b"\xff")
    assert read_texts(tmp_path) == {"a.txt": "one", "b.txt.gz": "two", "c.jsonl:1": "three\u2028 and"}
    assert read_texts(tmp_path / "a.txt") == {"a.txt": "one"}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"\xff\xfe\x00", "UnicodeDecodeError"),
        ("a.txt.gz", b"no gzip", "BadGzipFile"),
        pytest.param("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "EOFError", id="cut"),  # no time in its id
        ("a.jsonl", b"{", "JSONDecodeError"),
        ("a.jsonl", b'{"context": "x"}', "KeyError: 'text'"),
        ("a.jsonl", b'{"text": 3}', "line 1 holds a int"),
        ("a.jsonl", b"[1]", "TypeError"),
        ("a.pdf", b"x", "holds no .txt, .txt.gz, .jsonl"),
    ],
)
def test_errors_of_texts(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"`texts` .*{message}"):
        read_texts(tmp_path)


def test_an_interrupted_run_goes_on(toy, tmp_path):
    samples, path, seen = toy_samples(), tmp_path / "state" / "scores.safetensors", []

    def interrupt(done, total):
        seen.append((done, total))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_heads(toy, samples, interrupt, path)
    assert seen == [(1, 6), (2, 6), (3, 6)] and "Dustin" not in str(type(toy).__mro__)
    computed = []
    handle = toy.model.register_forward_pre_hook(lambda *args: computed.append(1))
    resumed = score_heads(toy, samples, state_path=path)
    handle.remove()
    assert len(computed) == 2 * 3  # prefill and block of the three that were missing
    assert torch.equal(resumed, score_heads(toy, samples))
    assert torch.equal(score_heads(toy, samples[:2], state_path=path), score_heads(toy, samples[:2]))
    assert [p.name for p in path.parent.iterdir()] == ["scores.safetensors"]


def test_errors_of_scores(toy, tmp_path):
    path = tmp_path / "scores.safetensors"
    score_heads(toy, toy_samples((60,)), state_path=path)
    other = tiny_model("llama", vocab_size=VOCABULARY, head_dim=64, num_hidden_layers=3)
    with pytest.raises(ValueError, match="`state_path` .* belongs to another model"):
        score_heads(other, toy_samples((60,)), state_path=path)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match="`state_path` .* cannot be read"):
        score_heads(toy, toy_samples((60,)), state_path=path)
    with pytest.raises(ValueError, match="`samples` are up to 600 tokens long, .* 512 positions .* shorter `lengths`"):
        score_heads(toy, [toy_sample(600, 0.5, 0)])
    with pytest.raises(ValueError, match="`samples` is empty"):
        score_heads(toy, [])


def test_best_heads_and_overlap():
    scores = torch.tensor([[0.1, 0.4, 0.4, 0.2], [0.5, 0.1, 0.2, 0.6]])
    assert best_heads(scores, 2) == {0: (1, 2), 1: (3, 0)}
    assert overlap({0: (1, 2), 1: (3, 0)}, {0: (2, 1), 1: (0, 3)}) == 1.0
    assert overlap({0: (1, 2), 1: (3, 0)}, {0: (2, 3), 1: (0, 3)}) == 0.75
    assert overlap({0: (1,)}, {0: (1, 2, 3, 0)}) == 0.25 and overlap({0: (1,)}, {1: (1,)}) == 0.0
    with pytest.raises(ValueError, match="`count` must be between 1 and the 4 heads"):
        best_heads(scores, 5)
    with pytest.raises(ValueError, match="`scores` hold NaN"):
        best_heads(scores * float("nan"), 1)
