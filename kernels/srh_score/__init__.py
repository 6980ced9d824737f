"""srh_score: how much attention a few chosen heads put on each committed token."""

from .naive import naive_srh_score

srh_score = naive_srh_score

__all__ = ["naive_srh_score", "srh_score"]
