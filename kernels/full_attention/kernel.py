"""Triton launcher of full_attention, registered as a custom op."""

import torch

from dustin_hf.kernels.dispatch import custom_op
from dustin_hf.kernels.naive_attention import check_attention
from dustin_hf.kernels.split_attention import split_attention

from .naive import naive_full_attention


def triton_full_attention(q, k, v, start, scale):
    """As `naive_full_attention`; the last dimension of `q`, `k` and `v` must be contiguous."""
    check_attention(q, k, v, start)
    return split_attention(q, k, v, None, start, scale)


full_attention_op = custom_op(naive_full_attention, triton_full_attention)


@full_attention_op.register_fake
def _(q, k, v, start, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
