"""Plain PyTorch twin of kv_append."""

import torch


def naive_kv_append(
    keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> None:
    """Write `L` new tokens of each row at slots `start[b] .. start[b] + L - 1`, in place. Source: ours.

    Slots outside `0 .. T - 1` are skipped: a row may ask for slot -1 when it has no token before its last one.

    Args:
        keys: stored keys of shape `[B, H, T, D]`, changed in place.
        values: stored values of shape `[B, H, T, D]`, changed in place.
        k: new keys of shape `[B, H, L, D]`, cast to the dtype of `keys`.
        v: new values of shape `[B, H, L, D]`.
        start: slot of the first new token of each row, shape `[B]`, int32 or int64, may be negative.

    Raises:
        ValueError: if the shapes do not agree.
    """
    check_kv_append(keys, values, k, v, start)
    slots = start[:, None] + torch.arange(k.shape[2], device=start.device)  # [B, L]
    rows, columns = torch.nonzero((slots >= 0) & (slots < keys.shape[2]), as_tuple=True)
    target = slots[rows, columns]
    keys[rows, :, target] = k[rows, :, columns].to(keys.dtype)
    values[rows, :, target] = v[rows, :, columns].to(values.dtype)


def check_kv_append(
    keys: torch.Tensor, values: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: torch.Tensor
) -> None:
    """Raise `ValueError` on arguments of `kv_append` that do not fit together."""
    if keys.shape != values.shape or k.shape != v.shape:
        raise ValueError(
            f"keys and values must agree: stored {tuple(keys.shape)} and {tuple(values.shape)}, "
            f"new {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if k.shape[:2] + k.shape[3:] != keys.shape[:2] + keys.shape[3:] or start.shape != k.shape[:1]:
        raise ValueError(
            f"k must be [B, H, L, D] and start [B] for storage {tuple(keys.shape)}, "
            f"got {tuple(k.shape)} and {tuple(start.shape)}"
        )
