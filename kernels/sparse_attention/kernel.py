"""Triton launcher of sparse_attention, registered as a custom op."""

import torch

from dustin_hf.kernels.dispatch import custom_op
from dustin_hf.kernels.naive_attention import check_attention, check_indices
from dustin_hf.kernels.split_attention import split_attention

from .naive import naive_sparse_attention


def triton_sparse_attention(q, k, v, indices, start, scale):
    """As `naive_sparse_attention`; the last dimension of `q`, `k`, `v` and `indices` must be contiguous."""
    check_attention(q, k, v, start)
    check_indices(indices, q, k)
    return split_attention(q, k, v, indices, start, scale)


sparse_attention_op = custom_op(naive_sparse_attention, triton_sparse_attention)


@sparse_attention_op.register_fake
def _(q, k, v, indices, start, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
