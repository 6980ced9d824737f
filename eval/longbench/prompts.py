"""Prompts as the official code makes them: template, cut from the middle, chat template, token ids."""

from typing import TYPE_CHECKING, Any

from dustin_hf.eval.longbench.data import Sample
from dustin_hf.eval.longbench.tasks import task_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def fill_template(sample: Sample) -> str:
    """The prompt as text: the task's template with the sample's context and input."""
    return task_of(sample.dataset).template.format(context=sample.context, input=sample.input)


def encode_prompt(
    sample: Sample, tokenizer: "PreTrainedTokenizerBase", max_length: int, max_positions: int
) -> list[int]:
    """Token ids that a model is given for a sample (`pred.py` of THUDM/LongBench).

    A longer prompt keeps its first and last `max_length // 2` tokens, since instructions stand at both ends. As in the
    official code the halves are joined as text, special tokens left out, and tokenised again; the chat template, where
    the task wants one and the tokenizer has one, comes afterwards. So a prompt may get a few tokens more than
    `max_length`.

    Args:
        sample: its `dataset` names the task.
        tokenizer: of the model.
        max_length: tokens of the filled template beyond which it is cut, the tokenizer's special ones counted.
        max_positions: the model's `max_position_embeddings`; prompt and longest answer must fit.

    Raises:
        ValueError: if they do not.
    """
    task = task_of(sample.dataset)
    if max_length < 2:
        raise ValueError(f"`max_length` must be at least 2, a token of each half, got {max_length}")
    room = max_positions - task.max_new_tokens
    if max_length > room:
        raise ValueError(
            f"`max_length` {max_length} leaves no room for the answers of {task.name}: expected at most {room}, "
            f"{max_positions} positions of the model less {task.max_new_tokens} new tokens; lower it"
        )
    text = _cut_middle(fill_template(sample), tokenizer, max_length)
    chat = task.chat and bool(tokenizer.chat_template)
    if chat:
        messages = [{"role": "user", "content": text}]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    ids = _encode(text, tokenizer, special=not chat)  # a chat template writes them itself
    if len(ids) > room:
        raise ValueError(
            f"the prompt of {task.name} {sample.id} has {len(ids)} tokens, chat template included, and {room} leave "
            f"room for its answer: lower `max_length` {max_length} by at least {len(ids) - room}"
        )
    return ids


def _cut_middle(text: str, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> str:
    """`text`, or where it has more than `max_length` tokens, the text of its first and of its last half of them."""
    ids = _encode(text, tokenizer)
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return "".join(str(tokenizer.decode(part, skip_special_tokens=True)) for part in (ids[:half], ids[-half:]))


def _encode(text: str, tokenizer: "PreTrainedTokenizerBase", special: bool = True) -> list[int]:
    # not verbose: prompts longer than the model are cut here, and no reason for a warning
    out: Any = tokenizer(text, truncation=False, add_special_tokens=special, verbose=False)
    return list(out["input_ids"])
