"""full_attention: a few new queries of each row over the whole row."""

from .naive import naive_full_attention

full_attention = naive_full_attention

__all__ = ["full_attention", "naive_full_attention"]
