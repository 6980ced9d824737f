"""lm-evaluation-harness: its generation tasks through Dustin equal those through stock generate; options; commands."""

import copy
import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dustin_hf import DustinConfig, DustinProfile
from dustin_hf.eval.harness import __main__ as command
from dustin_hf.eval.harness.options import DUSTIN_OPTIONS, split_options
from dustin_hf.eval.harness.stopping import StopTexts
from dustin_hf.testing import noisy_copy, tiny_model

CHARACTERS = ["<pad>", "<s>", "</s>", "<unk>", "\n", *(chr(i) for i in range(32, 127))]
PROMPTS = ["amber river stone: ", "Q", "winter copper bridge, quiet market lantern. Question: what is seven? Answer:"]
FULL = 100_000


def make_tokenizer(pad="<pad>"):
    """One token for each character, as many as the models know."""
    raw = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>", unk_token="<unk>", pad_token=pad)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a target and of a draft that agrees in part; with the end token as the pad, as many models have it."""
    folder = tmp_path_factory.mktemp("models")
    target = tiny_model(seed=2, vocab_size=len(CHARACTERS))
    target.generation_config.eos_token_id = [2, CHARACTERS.index(";")]  # one row of PROMPTS never gets there
    noisy_copy(target, 0.05).save_pretrained(folder / "draft")
    target.save_pretrained(folder / "target")
    make_tokenizer(pad="</s>").save_pretrained(folder / "target")
    return SimpleNamespace(target=str(folder / "target"), draft=str(folder / "draft"))


@pytest.fixture(scope="module")
def harness():
    """lm_eval's parts that the tests use, and the model class under test."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    from dustin_hf.eval.harness.model import DustinLM

    return SimpleNamespace(Instance=Instance, HFLM=HFLM, DustinLM=DustinLM)


@pytest.fixture(scope="module")
def stock(harness, pair):
    return harness.HFLM(pair.target, device="cpu", batch_size=3)


@pytest.fixture
def dustin(harness, pair):
    return harness.DustinLM(pair.target, draft=pair.draft, budget=FULL, device="cpu", batch_size=3)


def answers(harness, lm, prompts=PROMPTS, **options):
    options = {"until": ["\n\n"], "max_gen_toks": 60, **options}
    requests = [harness.Instance("generate_until", {}, (prompt, options), i) for i, prompt in enumerate(prompts)]
    return lm.generate_until(requests, disable_tqdm=True)


# without lm_eval


def test_options_are_split():
    config, left = split_options(
        {"budget": 64, "mode": "draft", "num_assistant_tokens": 3, "dtype": "float32", "attn_implementation": "eager"},
        ["dtype", "device"],
    )
    assert config == DustinConfig(budget=64, mode="draft", num_assistant_tokens=3)
    assert left == {"dtype": "float32", "attn_implementation": "eager"}
    assert "backend" not in DUSTIN_OPTIONS and split_options({"backend": "causal"}, ["backend"])[1]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bugdet": 64, "gama": 3}, r"`model_args` has unknown names \['bugdet', 'gama'\]"),
        ({"budget": "many"}, "`budget` must be a non-negative integer, got 'many'"),
        ({"mode": "sparse"}, "`mode` must be one of"),
        ({"draft_cache": "none"}, "`draft_cache` must be one of"),
        ({"num_assistant_tokens": 0}, "`num_assistant_tokens` must be a positive integer, got 0"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        split_options(options, ["dtype"])


def test_stop_texts_look_at_new_text_of_each_row():
    tokenizer = make_tokenizer()
    rows = ["stop.ab", "..stopx", "...abst", "xstop.."]
    ids = torch.tensor(tokenizer(rows)["input_ids"])
    assert StopTexts(tokenizer, ["stop", "ab"], start=2)(ids, None).tolist() == [True, True, True, False]
    assert StopTexts(tokenizer, ["stop"], start=0)(ids, None).tolist() == [False, True, False, True]
    assert StopTexts(tokenizer, ["stop"], start=3)(ids, None).tolist() == [False, False, False, False]


def test_the_command_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "dustin_hf.eval.harness.model", raising=False)
    with pytest.raises(SystemExit, match=r"needs lm_eval.*: pip install 'dustin_hf\[lm-eval\]'"):
        command.main()


# with lm_eval


def test_answers_equal_stock(harness, stock, dustin):
    """A batch of unequal prompts that end at end ids, at the limit, and at strings met at different places."""
    whole = answers(harness, stock, until="no such text")
    assert answers(harness, dustin, until="no such text") == whole
    assert whole[0][-1] == whole[2][-1] == ";" and len(set(map(len, whole))) == 3
    until = [whole[0][5:7], whole[1][20:22]]
    cut = answers(harness, stock, until=until)
    assert answers(harness, dustin, until=until) == cut
    assert [len(text) for text in cut[:2]] == [5, 20] and cut[2] == whole[2]
    assert answers(harness, dustin, PROMPTS[1:2], until=until) == cut[1:2]


def test_every_row_ends_by_itself(dustin):
    """Two rows go on to the first star and not beyond, one to its end id."""
    ids, mask = dustin.tok_batch_encode(PROMPTS)
    new = dustin._model_generate(ids, ids.shape[1] + 60, ["*"], attention_mask=mask)[:, ids.shape[1] :]
    rows = dustin.tokenizer.batch_decode(new, skip_special_tokens=True)
    assert [row[-1] for row in rows] == ["*", "*", ";"] and all(row.count("*") <= 1 for row in rows)
    assert new.shape[1] == (new != dustin.tokenizer.pad_token_id).sum(1).max() < 60


def test_sampling_is_passed_on(harness, dustin):
    greedy = answers(harness, dustin)
    assert answers(harness, dustin, do_sample=True, temperature=3.0, top_k=1) == greedy
    torch.manual_seed(0)
    assert answers(harness, dustin, do_sample=True, temperature=3.0) != greedy


def test_a_small_budget(harness, pair, stock):
    """Every option reaches the engine, and the answers show it; log-likelihoods stay the harness's own."""
    options = {"budget": 24, "mode": "target", "draft_cache": "streaming", "num_assistant_tokens": 3, "sinks": 2}
    profile = DustinProfile(target_heads={1: (0, 1)}, draft_heads={1: (2,)})
    lm = harness.DustinLM(pair.target, draft=pair.draft, profile=profile, device="cpu", batch_size=3, **options)
    seen = []
    generate = lm.model.generate
    lm.model.generate = lambda **kwargs: seen.append(generate(**kwargs, return_dict_in_generate=True)) or seen[-1][0]
    assert answers(harness, lm) != answers(harness, stock)
    assert {name: seen[0].stats.options[name] for name in options} == options
    assert seen[0].stats.num_assistant_tokens == 3 and seen[0].stats.kv_read_share < 0.9
    requests = [harness.Instance("loglikelihood", {}, (PROMPTS[2], text), 0) for text in (" seven", " four", ";")]
    expected = stock.loglikelihood(requests, disable_tqdm=True)
    assert lm.loglikelihood(requests, disable_tqdm=True) == expected


def test_the_target_drafts_for_itself(harness, pair, stock):
    lm = harness.DustinLM(pair.target, draft=pair.target, budget=FULL, device="cpu", batch_size=3)
    assert lm.draft is lm.model and answers(harness, lm) == answers(harness, stock)


def test_models_in_memory(harness, stock):
    """And a baseline's selection."""
    models = {"pretrained": copy.deepcopy(stock.model), "draft": stock.model, "tokenizer": stock.tokenizer}
    lm = harness.DustinLM(**models, mode="quest", budget=FULL, batch_size=2)
    assert answers(harness, lm) == answers(harness, stock)


def test_the_name_is_found(harness):
    from lm_eval.api.registry import get_model

    assert get_model("dustin") is harness.DustinLM and get_model("hf") is harness.HFLM
    (declared,) = re.findall(r'^dustin = "(.+)"$', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.M)
    assert EntryPoint("dustin", declared, "lm_eval.models").load() is harness.DustinLM


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "`draft` is needed in `model_args`"),
        ({"draft": "no-such-folder"}, "`draft` 'no-such-folder' cannot be loaded: "),
        ({"draft": "DRAFT", "profile": "no/such/folder"}, "`profile` 'no/such/folder' cannot be read: "),
        ({"draft": "DRAFT", "bugdet": 64}, r"unknown names \['bugdet'\]; .* harness \['add_bos_token', .*'dtype'"),
        ({"draft": "DRAFT", "budget": 7}, "`budget` must be at least"),
    ],
)
def test_wrong_arguments_are_named(harness, pair, monkeypatch, options, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    options = {name: pair.draft if value == "DRAFT" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        harness.DustinLM(pair.target, device="cpu", **options)


def test_models_that_do_not_belong_together(harness, pair):
    with pytest.raises(ValueError, match="do not share a tokenizer"):
        harness.DustinLM(pair.target, draft=tiny_model(vocab_size=2000), device="cpu")
    profile = DustinProfile(target_heads={7: (0,)}, draft_heads={1: (0,)})
    with pytest.raises(ValueError, match="`profile` names heads .* of target layer 7"):
        harness.DustinLM(pair.target, draft=pair.draft, profile=profile, device="cpu")


TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/samples.jsonl}}, cache_dir: {folder}/cache}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["*"], max_gen_toks: 40}}
metric_list: [{{metric: exact_match}}]
"""


def test_the_command_runs_a_task(harness, pair, stock, tmp_path, monkeypatch):
    """Through lm_eval's command line, with a task of one's own: the answers and scores of `--model hf`."""
    gold = answers(harness, stock, until=["*"], max_gen_toks=40)
    lines = [{"question": prompt, "answer": answer} for prompt, answer in zip(PROMPTS, [gold[0], gold[1], "?"])]
    (tmp_path / "samples.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "tiny.yaml").write_text(TASK.format(folder=tmp_path))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # the command sets it
    monkeypatch.setattr(
        sys,
        "argv",
        ["harness", "--model", "dustin", "--model_args", f"pretrained={pair.target},draft={pair.draft},budget={FULL}"]
        + ["--tasks", f"{tmp_path}/tiny.yaml", "--batch_size", "3", "--device", "cpu", "--log_samples"]
        + ["--output_path", f"{tmp_path}/out"],
    )
    command.main()
    (results,) = tmp_path.glob("out/*/results_*.json")
    assert json.loads(results.read_text())["results"]["tiny"]["exact_match,none"] == pytest.approx(2 / 3)
    (samples,) = tmp_path.glob("out/*/samples_tiny_*.jsonl")
    assert [json.loads(line)["resps"] for line in samples.read_text().splitlines()] == [[[text]] for text in gold]
