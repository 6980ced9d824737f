"""Per-step outputs: one processed and one raw entry for every new column, as stock `generate` returns them."""

import torch

_GROW = 64


class ColumnCollector:
    """Gathers `[B, V]` float32 entries by column while rows advance unevenly.

    Args:
        first_column: width of the padded prompts.
        limit: column at which rows end.
    """

    def __init__(self, first_column: int, limit: int):
        self.first_column, self.limit = first_column, limit
        self.columns: torch.Tensor | None = None  # [columns so far, B, V]

    def add(self, first: torch.Tensor, kept: torch.Tensor, block: torch.Tensor) -> None:
        """Store what belongs to the tokens kept in a step.

        Args:
            first: column of the block's first token, `[B]`.
            kept: tokens kept, `[B]`.
            block: `[B, L, V]`, float32.
        """
        batch, length, vocabulary = block.shape
        wanted = int((first + kept).max()) - self.first_column
        have = 0 if self.columns is None else len(self.columns)
        if wanted > have:
            # Cells of rows that have ended stay 0: finite, so that log-softmaxes of whole columns are too.
            columns = min(max(wanted, have + _GROW), self.limit - self.first_column)
            grown = block.new_zeros(columns, batch, vocabulary)
            if self.columns is not None:
                grown[:have] = self.columns
            self.columns = grown
        rows, places = torch.nonzero(torch.arange(length, device=kept.device) < kept[:, None], as_tuple=True)
        assert self.columns is not None
        self.columns[first[rows] - self.first_column + places, rows] = block[rows, places]

    def finish(self, width: int) -> tuple[torch.Tensor, ...]:
        """One `[B, V]` tensor for each of the columns `first_column .. width - 1`."""
        assert self.columns is not None
        return self.columns[: width - self.first_column].unbind(0)
