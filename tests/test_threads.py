"""Calls that overlap in time: of Dustin and of stock, on one model; the model is as it was found in the end."""

import threading

import pytest
import torch
from helpers import plain

import dustin_hf
from dustin_hf.testing import left_pad, random_prompts

PROMPTS = random_prompts([12, 30, 5])
OPTIONS = {"cache_implementation": "dustin", "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class After(dustin_hf.BatchStreamer):
    """Does something after a step."""

    def __init__(self, step, action):
        self.step, self.action = step, action

    def put_rows(self, rows):
        self.step -= 1
        if self.step == 0:
            self.action()


def call(target, draft, streamer=None):
    out = target.generate(**left_pad(PROMPTS), **OPTIONS, assistant_model=draft, streamer=streamer, max_new_tokens=24)
    return out[:, 30:].tolist()


def in_thread(results, name, function, *args):
    thread = threading.Thread(target=lambda: results.update({name: function(*args)}))
    thread.start()
    return thread


@pytest.fixture
def expected(pair):
    return [plain(pair.target, prompt, eos_token_id=None) for prompt in PROMPTS]


def test_the_first_call_ends_inside_the_second(pair, expected):
    first_runs, second_runs, found = threading.Event(), threading.Event(), {}

    def begun():
        first_runs.set()
        second_runs.wait(30)

    with dustin_hf.enable(pair.target):
        first = in_thread(found, "first", call, pair.target, pair.M, After(2, begun))
        first_runs.wait(30)

        def let_first_end():
            second_runs.set()
            first.join(30)

        found["second"] = call(pair.target, pair.M, After(2, let_first_end))
    assert found == {"first": expected, "second": expected}
    assert pair.target.config._attn_implementation == "sdpa"
    pair.target(torch.tensor([PROMPTS[0]]))  # nothing of Dustin is left in it


def test_stock_calls_beside_steps_and_prefills(pair, expected):
    """A padded batch needs its mask, whatever another thread does with the same model at that time."""

    def stock():
        out = pair.target.generate(
            **left_pad(PROMPTS), do_sample=False, eos_token_id=None, pad_token_id=0, max_new_tokens=24
        )
        return out[:, 30:].tolist()

    with dustin_hf.enable(pair.target):
        assert stock() == expected
        beside = []
        assert call(pair.target, pair.M, After(2, lambda: beside.append(stock()))) == expected
        entered = threading.Event()
        found: dict = {}

        def wait_for_stock(module, args, kwargs):
            if not entered.is_set():  # the first forward of the prefill
                entered.set()
                in_thread(found, "stock", stock).join(30)

        hook = pair.target.model.layers[1].register_forward_pre_hook(wait_for_stock, with_kwargs=True)
        try:
            assert call(pair.target, pair.M) == expected
        finally:
            hook.remove()
    assert beside == [expected] and found == {"stock": expected}


def test_calls_at_random(pair, expected):
    found: dict = {}
    with dustin_hf.enable(pair.target):
        threads = [in_thread(found, i, call, pair.target, (pair.M, pair.target)[i % 2]) for i in range(6)]
        for thread in threads:
            thread.join(60)
    assert found == dict.fromkeys(range(6), expected)
    assert pair.target.config._attn_implementation == pair.M.config._attn_implementation == "sdpa"
