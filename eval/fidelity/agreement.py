"""Agreement: how many new tokens the full cache would have chosen too."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def agreement(model: "PreTrainedModel", ids: torch.Tensor, prompt_length: int) -> float:
    """Share of the new tokens that are the model's own greedy choice after the same prefix, full cache.

    One stock forward over the whole text. Comparing two free runs position by position would say nothing after their
    first difference (paper appendix B measures on one trajectory for the same reason).

    Args:
        model: the target.
        ids: prompt and greedy output of one row, without pads, `[T]`.
        prompt_length: tokens of it that are the prompt.

    Returns:
        0 to 1; 1 where nothing is new.
    """
    new = ids[prompt_length:]
    if not len(new):
        return 1.0
    logits = model(input_ids=ids[None, :-1], use_cache=False, logits_to_keep=len(new)).logits[0]
    return (logits.argmax(-1) == new.to(logits.device)).float().mean().item()
