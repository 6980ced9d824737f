"""rope_sparse_attention: from the projections of a block to its attention over chosen slots, in one launch."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_rope_sparse_attention


def _kernel():
    from .kernel import rope_sparse_attention_op

    return rope_sparse_attention_op


rope_sparse_attention = twin(naive_rope_sparse_attention, _kernel)

__all__ = ["naive_rope_sparse_attention", "rope_sparse_attention"]
