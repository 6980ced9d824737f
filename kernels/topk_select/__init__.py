"""topk_select: the tiered choice of the slots that verification attends to."""

import torch

from dustin_hf.kernels.dispatch import runs_triton

from .naive import naive_topk_select


def topk_select(
    draft_scores: torch.Tensor,
    target_scores: torch.Tensor,
    lengths: torch.Tensor,
    draft_quota: torch.Tensor,
    sinks: int,
    window: int,
    k: int,
) -> torch.Tensor:
    """The Triton kernel on CUDA, else its twin; arguments and results as of `naive_topk_select`."""
    if runs_triton(draft_scores, target_scores):
        from .kernel import topk_select_op

        return topk_select_op(draft_scores, target_scores, lengths, draft_quota, sinks, window, k)
    return naive_topk_select(draft_scores, target_scores, lengths, draft_quota, sinks, window, k)


__all__ = ["naive_topk_select", "topk_select"]
