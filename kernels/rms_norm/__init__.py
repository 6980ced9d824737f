"""rms_norm: root-mean-square normalisation of rows."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_rms_norm


def _kernel():
    from .kernel import rms_norm_op

    return rms_norm_op


rms_norm = twin(naive_rms_norm, _kernel)

__all__ = ["naive_rms_norm", "rms_norm"]
