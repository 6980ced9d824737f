"""kv_append: write the keys and values of new tokens into ragged cache rows."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_kv_append


def _kernel():
    from .kernel import kv_append_op

    return kv_append_op


kv_append = twin(naive_kv_append, _kernel)

__all__ = ["kv_append", "naive_kv_append"]
