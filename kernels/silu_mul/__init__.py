"""silu_mul: the gate of a Llama-like MLP."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_silu_mul


def _kernel():
    from .kernel import silu_mul_op

    return silu_mul_op


silu_mul = twin(naive_silu_mul, _kernel)

__all__ = ["naive_silu_mul", "silu_mul"]
