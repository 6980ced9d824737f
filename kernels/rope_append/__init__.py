"""rope_append: from the projections of a block to rotated queries, and to keys and values in the cache."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_rope_append


def _kernel():
    from .kernel import rope_append_op

    return rope_append_op


rope_append = twin(naive_rope_append, _kernel)

__all__ = ["naive_rope_append", "rope_append"]
