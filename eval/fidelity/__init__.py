"""How faithful sparse verification is to the full cache."""

from dustin_hf.eval.fidelity.agreement import agreement
from dustin_hf.eval.fidelity.measure import fidelity
from dustin_hf.eval.fidelity.replay import replay

__all__ = ["agreement", "fidelity", "replay"]
