"""Real weights, by hand: `DUSTIN_MODELS=folder pytest -m real -s`, with `qwen-1.5b`, `qwen-0.5b`, `smollm2` inside."""

import argparse
import inspect
import os
import textwrap
from pathlib import Path

import pytest
import torch
from helpers import padded
from transformers import AutoModelForCausalLM, AutoTokenizer

import dustin_hf
from dustin_hf._compat import CACHE_ARG
from dustin_hf.eval.fidelity import agreement

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif("DUSTIN_MODELS" not in os.environ, reason="DUSTIN_MODELS names no folder of weights"),
    pytest.mark.filterwarnings("default"),
]
NEW = 64


def load(name):
    path = Path(os.environ["DUSTIN_MODELS"]) / name
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize("target_name, draft_name", [("smollm2", None), ("qwen-1.5b", "qwen-0.5b")])
def test_real_pair(target_name, draft_name):
    torch.set_num_threads(os.cpu_count() or 1)
    target, tokenizer = load(target_name)
    draft = load(draft_name)[0] if draft_name else target
    tokenizer.padding_side = "left"
    # code, cut in the middle of a function
    sources = [inspect.getsource(argparse.HelpFormatter)[:7000], inspect.getsource(textwrap.TextWrapper)[3000:9000]]
    prompts = [tokenizer(text).input_ids[:length] for text, length in zip(sources, (1100, 950))]
    inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
    width = inputs["input_ids"].shape[1]
    stock = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.0}
    expected = [target.generate(input_ids=torch.tensor([p]), **stock)[0, len(p) :].tolist() for p in prompts]
    with dustin_hf.enable(target):
        for budget in (4096, 256):
            out = target.generate(
                **inputs,
                **stock,
                assistant_model=draft,
                cache_implementation="dustin",
                cache_config={"budget": budget},
                num_assistant_tokens=4,
                return_dict_in_generate=True,
            )
            out[CACHE_ARG].check_integrity()
            rows = out.sequences[:, width:].tolist()
            if budget == 4096:
                pad = tokenizer.pad_token_id
                assert rows == padded(expected, max(map(len, expected)), pad)
            agreed = []
            for i, prompt in enumerate(prompts):
                ids = out.sequences[i, width - len(prompt) : width + out.stats.new_tokens[i]]
                agreed.append(agreement(target, ids, len(prompt)))
                print(f"\n--- {target_name}, budget {budget}, row {i}\n{tokenizer.decode(rows[i])}")
            stats = out.stats
            print(
                f"{target_name} + {draft_name or 'itself'}, budget {budget}: prompts {list(map(len, prompts))}, "
                f"tau {stats.tau:.2f} {[f'{t:.2f}' for t in stats.tau_per_row]}, KV read {stats.kv_read_share:.1%}, "
                f"agreement {[f'{a:.1%}' for a in agreed]}, seconds {stats.seconds}"
            )
            assert min(agreed) > 0.5


QUESTIONS = [
    ["My name is Ada and I keep bees. What should I do in spring?", "Name a city in France."],
    ["And in winter?", "What is it known for?"],
    ["What was my name?", "Name another one, please, and one thing to see there."],
]


def test_three_turns_of_a_real_chat():
    """Two rows of different lengths; every turn equals plain generate, and its prefill sees new tokens only."""
    torch.set_num_threads(os.cpu_count() or 1)
    model, tokenizer = load("smollm2")
    tokenizer.padding_side = "left"
    system = tokenizer.apply_chat_template([{"role": "system", "content": "Answer briefly."}], tokenize=False)
    chats = [tokenizer(system).input_ids for _ in range(2)]
    fed = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: fed.append(0 if "dustin" in kwargs else kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    cache = None
    for turn in QUESTIONS:
        for chat, question in zip(chats, turn):
            closing = "" if cache is None else "<|im_end|>\n"
            chat += tokenizer(f"{closing}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").input_ids
        expected = [
            model.generate(input_ids=torch.tensor([chat]), max_new_tokens=24, do_sample=False)[0, len(chat) :].tolist()
            for chat in chats
        ]
        held = 0 if cache is None else int(cache.lengths.sum())
        inputs = tokenizer.pad({"input_ids": chats}, return_tensors="pt")
        fed.clear()
        with dustin_hf.enable(model):
            out = model.generate(
                **inputs,
                assistant_model=model,
                **({"cache_implementation": "dustin"} if cache is None else {CACHE_ARG: cache}),
                max_new_tokens=24,
                do_sample=False,
                return_dict_in_generate=True,
            )
        cache, width = out[CACHE_ARG], inputs["input_ids"].shape[1]
        rows = [row[width : width + n].tolist() for row, n in zip(out.sequences, out.stats.new_tokens)]
        assert rows == expected
        assert sum(fed) == sum(map(len, chats)) - len(chats) - held
        print(f"prompts {list(map(len, chats))}, held {held}, prefilled {sum(fed)}, tau {out.stats.tau:.2f}")
        for chat, row in zip(chats, rows):
            print("  ", repr(tokenizer.decode(row)))
            # the end id that stopped a row is part of the closing of its turn
            chat += row[:-1] if row[-1] == tokenizer.eos_token_id else row
