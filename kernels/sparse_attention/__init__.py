"""sparse_attention: a few new queries of each row over chosen slots of the row."""

from .naive import naive_sparse_attention

sparse_attention = naive_sparse_attention

__all__ = ["naive_sparse_attention", "sparse_attention"]
