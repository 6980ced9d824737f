"""full_attention: a few new queries of each row over the whole row."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_full_attention


def _kernel():
    from .kernel import full_attention_op

    return full_attention_op


full_attention = twin(naive_full_attention, _kernel)

__all__ = ["full_attention", "naive_full_attention"]
