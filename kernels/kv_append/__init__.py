"""kv_append: write the keys and values of new tokens into ragged cache rows."""

from .naive import naive_kv_append

kv_append = naive_kv_append

__all__ = ["kv_append", "naive_kv_append"]
