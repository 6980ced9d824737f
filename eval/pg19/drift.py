"""Drift of long outputs: free runs under sparse verification, judged part by part by the full cache."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import dustin_hf
from dustin_hf.eval.efficiency.texts import NGRAM
from dustin_hf.eval.parts import Parts
from dustin_hf.eval.pg19.books import Passage
from dustin_hf.profile import DustinProfile
from dustin_hf.validation import check_positions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PART = 512


def drift(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    chosen: Sequence[Passage],
    profile: DustinProfile,
    budgets: Sequence[int],
    new_tokens: int = 2048,
    gamma: int = 3,
    parts: Parts | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Continue each context greedily, with the full cache (lossless) and with every budget, and look at the outputs.

    Of each part of 512 new tokens: agreement (share of its tokens that the full cache would have chosen after the same
    text), perplexity of the output itself to the full cache, and the share of its 8-grams that the output had before.
    Agreement that falls from part to part would mean that errors add up. Up to the end of each part, as the task's own
    metric: ROUGE-L (F measure) of the output's tokens against as many that follow in the book.

    Args:
        target: whose outputs they are.
        draft: drafts.
        chosen: passages; their contexts are continued, one at a time. What follows in the book is the reference, unless
            it is shorter than the outputs.
        profile: of the pair.
        budgets: k.
        new_tokens: of each output; no token ends it.
        gamma: drafted tokens per step.
        parts: hold the outputs that are done.
        progress: called as `progress("drift", done, total)`, in outputs.

    Returns:
        For each budget (None: full cache) `tau`, `tokens_per_s` of decoding, and `parts`.

    Raises:
        ValueError: if an output would not fit the target's positions.
    """
    check_positions(target.config, max(len(passage.context) for passage in chosen) + new_tokens)
    rows: list[dict[str, Any]] = []
    options: list[dict[str, Any]] = [{"mode": "full"}, *({"budget": budget} for budget in budgets)]
    parts = parts or Parts()
    warm: set[int] = set()
    for number, option in enumerate(options):

        def continued(passage: Passage, option: dict[str, Any] = option, number: int = number) -> dict[str, Any]:
            if number not in warm:  # kernels are compiled in the first steps of their kind, which would be counted
                _continued(target, draft, passage, profile, option, gamma, min(new_tokens, 4 * (gamma + 1)))
                warm.add(number)
            out = _continued(target, draft, passage, profile, option, gamma, new_tokens)
            seconds = out.stats.seconds.items()
            return {
                "new": sum(out.stats.new_tokens),
                "steps": len(out.stats.committed[0]),
                "seconds": sum(value for name, value in seconds if name not in ("prefill", "capture")),
                "parts": _parts(target, out.sequences[0], passage),
            }

        outputs = []
        for i, passage in enumerate(chosen):
            if progress is not None:
                progress("drift", number * len(chosen) + i, len(options) * len(chosen))
            outputs.append(parts.of(f"drift {number} of passage {i}", functools.partial(continued, passage)))
        new, steps, seconds = (sum(output[name] for output in outputs) for name in ("new", "steps", "seconds"))
        rows.append(
            {
                "budget": option.get("budget"),
                "tau": new / steps,
                "tokens_per_s": new / seconds,
                "parts": [_mean(list(part)) for part in zip(*(output["parts"] for output in outputs))],
            }
        )
    if progress is not None:
        progress("drift", len(options) * len(chosen), len(options) * len(chosen))
    return rows


def _continued(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    passage: Passage,
    profile: DustinProfile,
    option: dict[str, Any],
    gamma: int,
    new_tokens: int,
) -> Any:
    """What `generate` returns for a context; no token ends it."""
    ids = torch.tensor([passage.context], device=target.device)
    own = target.generation_config.eos_token_id
    target.generation_config.eos_token_id = None
    try:
        with dustin_hf.enable(target, profile=profile):
            generate: Any = target.generate
            return generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                assistant_model=draft,
                cache_implementation="dustin",
                cache_config=option,
                num_assistant_tokens=gamma,
                max_new_tokens=new_tokens,
                do_sample=False,
                pad_token_id=0,
                return_dict_in_generate=True,
            )
    finally:
        target.generation_config.eos_token_id = own


@torch.no_grad()
def _parts(model: "PreTrainedModel", ids: torch.Tensor, passage: Passage) -> list[dict[str, float]]:
    """Figures of each part of an output, `ids [T]` with its prompt."""
    new = ids[len(passage.context) :]
    logits = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=len(new)).logits[0]
    repeated = _repeated(new.tolist())
    found = []
    for begin in range(0, len(new), PART):
        part = slice(begin, begin + PART)
        scores = logits[part].float().log_softmax(-1)
        tokens = new[part].to(scores.device)
        ended = repeated[max(0, begin - NGRAM + 1) : max(0, begin + PART - NGRAM + 1)]
        found.append(
            {
                "agreement": float((scores.argmax(-1) == tokens).double().mean()),
                "nll": float(-scores.gather(1, tokens[:, None]).double().mean()),
                "repeated": sum(ended) / max(1, len(ended)),
            }
        )
        so_far = new[: begin + PART].tolist()
        if len(passage.following) >= len(new):
            found[-1]["rouge_l"] = rouge_l(so_far, passage.following[: len(so_far)])
    return found


def rouge_l(output: Sequence[int], reference: Sequence[int]) -> float:
    """ROUGE-L, F measure: from the longest common subsequence of two rows of tokens, 0 to 1."""
    from rapidfuzz.distance import LCSseq

    return 2 * LCSseq.similarity(output, reference) / (len(output) + len(reference))


def _repeated(tokens: Sequence[int]) -> list[bool]:
    """Of each 8-gram whether the output had it before."""
    seen: set[tuple[int, ...]] = set()
    found = []
    for gram in zip(*(tokens[i:] for i in range(NGRAM))):
        found.append(gram in seen)
        seen.add(gram)
    return found


def _mean(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over outputs; perplexity from the mean of its logarithm."""
    means = {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}
    return {**means, "perplexity": math.exp(means["nll"])}
