"""Triton launcher of full_attention, registered as a custom op."""

import torch

from dustin_hf.kernels.dispatch import custom_op
from dustin_hf.kernels.naive_attention import check_attention
from dustin_hf.kernels.split_attention import split_attention

from .naive import naive_full_attention

# Most rows of a tile of queries: gamma 8 with groups of 14. Twice as many would leave the registers, run slowly and
# compile for seconds, for each length of a block anew.
MOST_ROWS = 128


def triton_full_attention(q, k, v, start, scale):
    """As `naive_full_attention`; the last dimension of `q`, `k` and `v` must be contiguous."""
    check_attention(q, k, v, start)
    new, most = q.shape[1], max(1, MOST_ROWS * k.shape[1] // q.shape[2])
    if new <= most:
        return split_attention(q, k, v, None, start, scale)
    # Longer blocks in parts of one length, as what a part sees of its own block is in the storage like all else. The
    # last one ends with the block, so it may repeat some of the one before.
    o, lse = q.new_empty(q.shape), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for begin in (*range(0, new - most, most), new - most):
        part = slice(begin, begin + most)
        o[:, part], lse[:, part] = split_attention(q[:, part], k, v, None, start + begin, scale)
    return o, lse


full_attention_op = custom_op(naive_full_attention, triton_full_attention)


@full_attention_op.register_fake
def _(q, k, v, start, scale):
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)
