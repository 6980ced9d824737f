"""How faithful sparse verification is to the full cache."""

from dustin_hf.eval.fidelity.agreement import agreement

__all__ = ["agreement"]
