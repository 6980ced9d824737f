"""srh_score: how much attention a few chosen heads put on each committed token."""

from dustin_hf.kernels.dispatch import twin

from .naive import naive_srh_score


def _kernel():
    from .kernel import srh_score_op

    return srh_score_op


srh_score = twin(naive_srh_score, _kernel)

__all__ = ["naive_srh_score", "srh_score"]
