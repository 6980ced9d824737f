"""topk_select: the tiered choice of the slots that verification attends to."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_topk_select


def _kernel():
    from .kernel import topk_select_op

    return topk_select_op


topk_select = twin(naive_topk_select, _kernel)

__all__ = ["naive_topk_select", "topk_select"]
