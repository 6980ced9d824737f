"""Full-cache baselines out of PyTorch: scaled_dot_product_attention as it is usually called, and with packed groups."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

PACKED_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


def unpacked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """FlashAttention over `q [B, HQ, L, D]` and `k, v [B, H, T, D]`: what a plain verify over the full cache does.

    Without the causal mask among the last tokens: it would change the result, not the time.
    """
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def packed(backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same with the query heads of a group as rows, `q [B, H, L * G, D]`, so keys and values are read once.

    Without a mask, too, which is to its advantage.
    """
    with sdpa_kernel(PACKED_BACKENDS[backend]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)
