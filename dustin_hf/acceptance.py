"""Which drafted tokens stand: greedy match and speculative sampling, each row by itself. Pure functions."""

from collections.abc import Callable

import torch

# scores, drafts and their probabilities (None when greedy) -> tokens and how many drafts were accepted
Accept = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


def greedy_accept(
    scores: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep drafts up to the first that is not the target's best token, then that best token.

    Args:
        scores: processed target scores of the block, `[B, gamma + 1, V]`.
        drafts: drafted tokens, `[B, gamma]`.
        draft_probs: not looked at.

    Returns:
        `tokens [B, gamma + 1]`, of which the first `accepted + 1` are the step's result, and `accepted [B]`.
    """
    tokens = scores.argmax(-1)
    matches = (tokens[:, :-1] == drafts).long().cumprod(-1)
    return tokens, matches.sum(-1)


def sampling_accept(
    scores: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): the result has the target's law whatever the draft's.

    Args:
        scores: processed target scores of the block, `[B, gamma + 1, V]`.
        drafts: drafted tokens, `[B, gamma]`.
        draft_probs: the probabilities the drafts were drawn from, `[B, gamma, V]`; None where gamma is 0.

    Returns:
        `tokens [B, gamma + 1]`, of which the first `accepted + 1` are the step's result, and `accepted [B]`.
    """
    gamma, probs = drafts.shape[1], scores.float().softmax(-1)
    if draft_probs is None:
        draft_probs = probs[:, :0]
    p = probs[:, :-1].gather(-1, drafts[..., None]).squeeze(-1)
    q = draft_probs.gather(-1, drafts[..., None]).squeeze(-1)
    # u < p / q without the division; u is in [0, 1), so a token the target rules out (p = 0) is never kept
    kept = torch.rand_like(p) * q < p
    accepted = kept.long().cumprod(-1).sum(-1)  # [B]
    at = accepted[:, None, None].expand(-1, 1, probs.shape[-1])
    here = probs.gather(1, at).squeeze(1)  # [B, V]
    # after a rejection draw from what the draft under-estimated; after gamma acceptances there is no draft to subtract
    padded = torch.cat([draft_probs, torch.zeros_like(probs[:, :1])], dim=1)
    residual = (here - padded.gather(1, at).squeeze(1)).clamp(min=0)
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, here)
    final = torch.multinomial(residual, 1)  # [B, 1]
    tokens = torch.cat([drafts, final], dim=1)
    index = torch.arange(gamma + 1, device=drafts.device)
    return torch.where(index == accepted[:, None], final, tokens), accepted
