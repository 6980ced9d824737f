"""How answers are generated, greedily and with LongBench's stop rule, and read from the tokens of a row."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from dustin_hf.eval.longbench.tasks import Task

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase


def end_ids(task: Task, tokenizer: "PreTrainedTokenizerBase", generation_config: "GenerationConfig") -> list[int]:
    """Tokens that end an answer of the task.

    Those of the model; for samsum also the tokenizer's and the newline. There the official code leaves those out that
    the model alone knows (Llama 3 has several), and so may run on behind the end of an answer.

    Args:
        task: one of `TASKS`.
        tokenizer: of the model.
        generation_config: the model's.

    Raises:
        ValueError: if a newline ends the answers, and the tokenizer has no token for one.
    """
    own: Any = generation_config.eos_token_id
    ends = list(own) if isinstance(own, list) else [own]
    if task.ends_at_newline:
        newline = tokenizer.encode("\n", add_special_tokens=False)
        if not newline:
            raise ValueError(
                f"{task.name} ends at a newline, for which this tokenizer has no token: leave the task out"
            )
        ends += [tokenizer.eos_token_id, newline[-1]]
    return list(dict.fromkeys(end for end in ends if end is not None))


def generate_arguments(
    task: Task, tokenizer: "PreTrainedTokenizerBase", generation_config: "GenerationConfig"
) -> dict[str, Any]:
    """Keyword arguments of `generate` for the task, besides the prompts.

    Args:
        task: one of `TASKS`.
        tokenizer: of the model.
        generation_config: the model's.

    Raises:
        ValueError: as `end_ids`.
    """
    arguments: dict[str, Any] = {"do_sample": False, "num_beams": 1, "max_new_tokens": task.max_new_tokens}
    if task.ends_at_newline:
        # an answer that starts on a new line must not end there
        arguments |= {"min_new_tokens": 1, "eos_token_id": end_ids(task, tokenizer, generation_config)}
    return arguments


def decode_answer(ids: Sequence[int], tokenizer: "PreTrainedTokenizerBase", ends: Collection[int]) -> str:
    """The answer in one row: its text up to the first end, without special tokens.

    In a batch a row that has ended goes on with pads, and a pad need not be a special token.

    Args:
        ids: new tokens of the row, the prompt left out.
        tokenizer: of the model.
        ends: tokens that end an answer, as from `end_ids`.
    """
    stop = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids))
    return str(tokenizer.decode(list(ids[:stop]), skip_special_tokens=True))
