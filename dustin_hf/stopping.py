"""Where each row ends inside a block: end ids, limits, and any stopping criteria, token by token."""

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class Ending:
    """Decides how many tokens of a block a row keeps, and whether it ends there.

    Args:
        criteria: as prepared by `generate`. End ids and the length limit are looked up for the whole block at once;
            the others are called for every new column, with the whole batch, as stock `generate` calls them.
        eos: the end ids, `[n]`, or None.
        limit: column at which every row ends (`max_length`).
    """

    def __init__(self, criteria: StoppingCriteriaList, eos: torch.Tensor | None, limit: int):
        self.others = [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        self.eos, self.limit = eos, limit

    @classmethod
    def of(cls, criteria: StoppingCriteriaList, device: torch.device, width: int) -> "Ending":
        """From criteria as stock `generate` prepares them: the user's own end ids and limits replace the defaults.

        As in stock, prompts of `width` columns get a token at least, however low the limit.
        """
        ends = [c.eos_token_id.reshape(-1).to(device) for c in criteria if type(c) is EosTokenCriteria]
        limit = min(c.max_length for c in criteria if type(c) is MaxLengthCriteria)
        return cls(criteria, torch.cat(ends) if ends else None, max(limit, width + 1))

    def __call__(
        self,
        sequences: torch.Tensor,
        first: torch.Tensor,
        tokens: torch.Tensor,
        kept: torch.Tensor,
        limit: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut a block.

        Args:
            sequences: left-padded tokens with the block in place.
            first: column of the block's first token, `[B]`.
            tokens: the block, `[B, L]`.
            kept: tokens of it that acceptance keeps, `[B]`; 0 for rows that have ended before.
            limit: the column at which rows end, as a scalar on the device.

        Returns:
            `kept [B]`, cut after the first token that ends the row, and `ended [B]`.
        """
        kept = torch.minimum(kept, (limit - first).clamp(min=0))
        ended = first + kept >= limit
        index = torch.arange(tokens.shape[1], device=tokens.device)
        if self.eos is not None:
            # not `isin`, which sorts a dozen ids, for which the host waits
            is_end = (tokens[..., None] == self.eos.to(tokens.device)).any(-1) & (index < kept[:, None])
            ended = ended | is_end.any(1)
            kept = torch.where(is_end.any(1), is_end.long().argmax(1) + 1, kept)
        if self.others:
            kept, ended = self._call_others(sequences, first, kept, ended)
        return kept, ended

    def _call_others(
        self, sequences: torch.Tensor, first: torch.Tensor, kept: torch.Tensor, ended: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        spans = [range(f + 1, f + k + 1) for f, k in zip(first.tolist(), kept.tolist())]
        for column in sorted({c for span in spans for c in span}):
            here = (column > first) & (column <= first + kept)  # rows already cut before this column are left out
            for criterion in self.others:
                stop = criterion(sequences[:, :column], None)
                stop = torch.as_tensor(stop, device=here.device) & here
                kept = torch.where(stop, column - first, kept)
                ended = ended | stop
        return kept, ended
