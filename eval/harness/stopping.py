"""Stop strings of a task, which end each row of a batch by itself."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopTexts(StoppingCriteria):
    """Ends a row as soon as the end of its new text holds one of the texts; the prompt does not count.

    lm_eval's own criterion ends a batch once all rows have met the same text, and remembers which have. Rows that
    progress unevenly are shown with pads where they are behind; where the pad is the end token, as in many models, that
    would count as met and cut slow rows short. So this one remembers nothing and answers for every row.

    Args:
        tokenizer: of the target.
        texts: at least one.
        start: column of the first new token.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str], start: int):
        self.tokenizer, self.texts, self.start = tokenizer, texts, start
        # Two more than the text itself takes, as in lm_eval: what is generated may be cut into other tokens.
        self.tail = 2 + max(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        ends = self.tokenizer.batch_decode(input_ids[:, max(self.start, input_ids.shape[1] - self.tail) :])
        return torch.tensor([any(text in end for text in self.texts) for end in ends], device=input_ids.device)
