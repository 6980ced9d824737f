"""sparse_attention: a few new queries of each row over chosen slots of the row."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_sparse_attention


def _kernel():
    from .kernel import sparse_attention_op

    return sparse_attention_op


sparse_attention = twin(naive_sparse_attention, _kernel)

__all__ = ["naive_sparse_attention", "sparse_attention"]
