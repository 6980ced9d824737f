"""Perplexity of books under sparse verification: the book's own tokens, as a sparse run reads them."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dustin_hf.eval.fidelity.measure import SINKS, WINDOW
from dustin_hf.eval.fidelity.policies import build_arms
from dustin_hf.eval.fidelity.replay import replay
from dustin_hf.eval.parts import Parts
from dustin_hf.eval.pg19.books import Passage
from dustin_hf.profile import DustinProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODES = ("full", "hybrid", "target", "draft", "streaming")


def perplexity(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    chosen: Sequence[Passage],
    profile: DustinProfile,
    budgets: Sequence[int],
    modes: Sequence[str] = MODES,
    gamma: int = 4,
    batch_size: int = 1,
    parts: Parts | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Perplexity of what follows each context, under every policy and budget.

    The tokens of the book are verified `gamma` at a time in a real sparse run (`replay`), so that keys, values and
    histories carry its errors on. Each token but the first is predicted.

    Args:
        target: its verification is sparse.
        draft: it looks ahead.
        chosen: passages, all with as many following tokens.
        profile: of the pair.
        budgets: k.
        modes: as for `fidelity`; `"full"` is the model's own.
        gamma: tokens of a window.
        batch_size: passages that are run at once.
        parts: hold the batches that are done.
        progress: called as `progress("perplexity", done, total)`, in windows of batches.

    Returns:
        For each policy and budget `perplexity`, over all tokens of all passages, and that of each passage.

    Raises:
        ValueError: on modes or budgets that cannot be served, passages that differ in their following tokens or have
            fewer than two, or contexts that do not fit a model.
    """
    following = {len(passage.following) for passage in chosen}
    if len(following) != 1 or min(following) < 2:
        raise ValueError(f"passages must all have as many following tokens, at least two, got {sorted(following)}")
    arms = build_arms(target, draft, profile, modes, budgets, SINKS, WINDOW)
    parts = parts or Parts()
    found: list[list[float]] = [[] for _ in arms]
    batches = [chosen[i : i + batch_size] for i in range(0, len(chosen), batch_size)]
    for number, batch in enumerate(batches):

        def step(done: int, total: int, number: int = number) -> None:
            if progress is not None:
                progress("perplexity", number * total + done, len(batches) * total)

        def replayed(batch: Sequence[Passage] = batch, step: Callable[[int, int], None] = step) -> list[list[float]]:
            _, runs = replay(
                target,
                draft,
                [passage.context for passage in batch],
                [arm.policy for arm in arms],
                new_tokens=min(following),
                gamma=gamma,
                continuations=[passage.following for passage in batch],
                progress=step,
            )
            return [run.nll[:, :-1].double().mean(1).tolist() for run in runs]

        for means, of_batch in zip(found, parts.of(f"perplexity of batch {number}", replayed)):
            means += of_batch
    return [
        {
            "mode": arm.mode,
            "budget": arm.budget,
            "perplexity": math.exp(math.fsum(means) / len(means)),
            "passages": [math.exp(mean) for mean in means],
        }
        for arm, means in zip(arms, found)
    ]
