"""topk_select: the tiered choice of the slots that verification attends to."""

from .naive import naive_topk_select

topk_select = naive_topk_select

__all__ = ["naive_topk_select", "topk_select"]
