"""Rows of attention that a profile needs, from tapped queries and cached keys; never a whole [L, L] matrix."""

from typing import TYPE_CHECKING

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.enabling import enable
from dustin_hf.forward import StockForward
from dustin_hf.model_patches.attention import BlockAttention, block_attention
from dustin_hf.profile import Heads
from dustin_hf.scoring import Queries
from dustin_hf.selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def attention_rows(q: torch.Tensor, keys: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Softmax rows of consecutive tokens over everything before and among them.

    One key/value head at a time, so that the only copy of keys in float32 is that of one head.

    Args:
        q: queries after rotary embedding of tokens `start .. start + L - 1` of one row, `[L, HQ, D]`.
        keys: that row's cache storage after rotary embedding, slot equals position, `[H, T, D]` with
            `T >= start + L`; query head `h` reads key head `h // (HQ // H)`.
        start: tokens before the first query.
        scale: factor of the scores, usually `D ** -0.5`.

    Returns:
        `[HQ, L, start + L]` float32, computed in float32 or wider; zero after each query's own position.

    Raises:
        ValueError: if the shapes do not agree.
    """
    if q.ndim != 3 or keys.ndim != 3 or q.shape[2] != keys.shape[2] or q.shape[1] % keys.shape[0]:
        raise ValueError(
            f"q must be [L, HQ, D] and keys [H, T, D] with HQ a multiple of H, "
            f"got {tuple(q.shape)} and {tuple(keys.shape)}"
        )
    new, q_heads, _ = q.shape
    end = start + new
    if start < 0 or end > keys.shape[1]:
        raise ValueError(f"`start` must leave room for {new} queries among {keys.shape[1]} slots of keys, got {start}")
    group = q_heads // keys.shape[0]
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = torch.empty(q_heads, new, end, dtype=torch.float32, device=q.device)
    later = torch.ones(new, new, dtype=torch.bool, device=q.device).triu(1)
    with torch.autocast(q.device.type, enabled=False):
        for head in range(keys.shape[0]):
            heads = slice(head * group, (head + 1) * group)
            scores = (q[:, heads].to(wide).transpose(0, 1) * scale) @ keys[head, :end].to(wide).T  # [G, L, end]
            scores[:, :, start:].masked_fill_(later, float("-inf"))
            rows[heads] = scores.softmax(-1)
    return rows


def mass(rows: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Attention that each row puts on positions `begin .. end - 1`: `[HQ, L, T]` to `[HQ, L]`."""
    return rows[:, :, begin:end].sum(-1)


def all_heads(model: "PreTrainedModel") -> Heads:
    """Every query head of every layer."""
    config = model.config.get_text_config(decoder=True)
    return {layer: tuple(range(config.num_attention_heads)) for layer in range(config.num_hidden_layers)}


@torch.no_grad()
def tapped_block(
    model: "PreTrainedModel",
    cache: DustinCache,
    ids: torch.Tensor,
    start: torch.Tensor | None = None,
    heads: Heads | None = None,
    logits_to_keep: int = 0,
) -> tuple[torch.Tensor, Queries]:
    """Run a block of new tokens of every row over the full cache, and keep the queries of some heads.

    Nothing is committed: keys and values of the block are written from slot `start[b]` on, where `attention_rows` can
    read them, but the lengths of the cache stay (the caller sets them where the tokens are to stay). The model is left
    as found.

    Args:
        model: target or draft; need not be enabled.
        cache: its storage is written, its lengths are not.
        ids: new tokens, `[B, L]`.
        start: tokens before them, `[B]`. Default: `cache.lengths`.
        heads: layer -> query heads to keep. Default: all of all layers.
        logits_to_keep: positions of logits to return, counted from the end; 0 for all.

    Returns:
        Logits `[B, L or logits_to_keep, V]`, and the queries after rotary embedding, layer -> `[B, L, NH, D]` in the
        order of `heads`, on the device of their layer.

    Raises:
        ValueError: if the block does not fit the cache.
    """
    # a copy: the caller may set the lengths, which changes them in place, while it still reads this block
    start = cache.lengths.clone() if start is None else start
    if int(start.max()) + ids.shape[1] > cache.capacity:
        raise ValueError(
            f"a block of {ids.shape[1]} tokens from {int(start.max())} on does not fit the cache's capacity of "
            f"{cache.capacity}: make it with a larger `capacity`, or `grow` it"
        )
    attention = BlockAttention(start, Selection(), all_heads(model) if heads is None else heads)
    with enable(model), block_attention(model):
        logits = StockForward(model)(cache, ids, attention, logits_to_keep)
    return logits, attention.queries
