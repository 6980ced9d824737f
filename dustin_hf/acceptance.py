"""Which drafted tokens stand: greedy match and speculative sampling, each row by itself. Pure functions."""

import torch


def greedy_accept(scores: torch.Tensor, drafts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep drafts up to the first that is not the target's best token, then that best token.

    Args:
        scores: processed target scores of the block, `[B, gamma + 1, V]`.
        drafts: drafted tokens, `[B, gamma]`.

    Returns:
        `tokens [B, gamma + 1]`, of which the first `accepted + 1` are the step's result, and `accepted [B]`.
    """
    tokens = scores.argmax(-1)
    matches = (tokens[:, :-1] == drafts).long().cumprod(-1)
    return tokens, matches.sum(-1)


def sampling_accept(
    probs: torch.Tensor, draft_probs: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Speculative sampling (Leviathan et al. 2023, algorithm 1): the result has the target's law whatever the draft's.

    Args:
        probs: processed target probabilities of the block, `[B, gamma + 1, V]`.
        draft_probs: the probabilities the drafts were drawn from, `[B, gamma, V]`.
        drafts: drafted tokens, `[B, gamma]`.

    Returns:
        `tokens [B, gamma + 1]`, of which the first `accepted + 1` are the step's result, and `accepted [B]`.
    """
    gamma = drafts.shape[1]
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
