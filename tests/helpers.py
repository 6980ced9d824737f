"""What several test modules use: pairs of models, Dustin calls, and plain generate row by row as the oracle."""

from dataclasses import dataclass
from typing import Any

import torch

import dustin_hf
from dustin_hf.testing import left_pad


@dataclass
class Pair:
    target: Any
    S: Any
    D: Any
    M: Any

    @property
    def drafts(self):
        """Every way to draft: accepted whole, rejected, in part, and the target for itself."""
        return {"S": self.S, "D": self.D, "M": self.M, "self": self.target}


def dustin(target, draft, prompts, *, gamma=4, budget=100_000, new=24, config=None, profile=None, **kwargs):
    """Rows of new tokens, and the whole output, of one Dustin call on a left-padded batch."""
    kwargs = {"do_sample": False, "max_new_tokens": new, **kwargs}
    with dustin_hf.enable(target, profile=profile):
        out = target.generate(
            **left_pad(prompts),
            assistant_model=draft,
            cache_implementation="dustin",
            cache_config={"budget": budget, **(config or {})},
            num_assistant_tokens=gamma,
            return_dict_in_generate=True,
            **kwargs,
        )
    width = max(map(len, prompts))
    return out.sequences[:, width:].tolist(), out


def plain(target, prompt, *, new=24, **kwargs):
    """New tokens of stock generate on one row, batch 1, no padding, no draft."""
    kwargs = {"do_sample": False, "max_new_tokens": new, **kwargs}
    out = target.generate(
        input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), **kwargs
    )
    return out[0, len(prompt) :].tolist()


def padded(rows, width, pad=0):
    """Rows as `generate` returns them: filled with pads to a common width."""
    return [row + [pad] * (width - len(row)) for row in rows]


def assert_rows_equal_plain(target, draft, prompts, **kwargs):
    """At full budget every row equals plain generate of that row alone."""
    rows, out = dustin(target, draft, prompts, **kwargs)
    kwargs = {k: v for k, v in kwargs.items() if k not in ("gamma", "budget", "config")}
    expected = [plain(target, prompt, **kwargs) for prompt in prompts]
    assert rows == padded(expected, max(map(len, expected)))
    return out


def heads(q_heads, kv_heads, head_dim=8):
    """Overrides of `tiny_model` for a head grouping; Llama wants the hidden size to be a multiple of the heads."""
    return {
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": 64 if 64 % q_heads == 0 else 8 * q_heads,
    }


class Counted:
    """A function that is cut off at one of its calls."""

    def __init__(self, function, end=None):
        self.function, self.end, self.calls = function, end, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.end:
            raise KeyboardInterrupt
        return self.function(*args, **kwargs)
