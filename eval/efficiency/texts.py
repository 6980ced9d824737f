"""What `bench decode` needs for real runs: models and texts read, prompts cut, outputs compared with what was there."""

import gzip
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

import dustin_hf
from dustin_hf.validation import check_positions

# The excerpts that come with the demo; far too short for long contexts.
EXCERPTS = Path(dustin_hf.__file__).parent / "demo_texts"
NGRAM = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of one row, and where they come from: the file, and the place of the first one in it."""

    source: str
    start: int
    tokens: list[int]


def load_pair(
    target: str, draft: str, device: str = "cuda", longest: int = 0, draft_longest: int = 0
) -> tuple[Any, Any, Any]:
    """Target, draft and the target's tokenizer; in bfloat16 on CUDA, in float32 elsewhere.

    Args:
        target: folder with safetensors or a single `.gguf` file, which is dequantised; or a Hub id.
        draft: likewise.
        device: of both.
        longest: positions that the target must have for the rows.
        draft_longest: likewise the draft.

    Raises:
        FileNotFoundError: if there is no such model, or its file is torn.
        ValueError: if the rows are longer than a model allows, before any weights are read.
    """
    dtype = torch.bfloat16 if torch.device(device).type == "cuda" else torch.float32
    named = (("--target", target, longest), ("--draft", draft, draft_longest))
    for option, name, positions in named:
        if positions:
            with _named(option, name):
                config = AutoConfig.from_pretrained(name, **_gguf(name, "config.json"))
            check_positions(config, positions, option.removeprefix("--"))
    models = []
    for option, name, _ in named:
        options = _gguf(name, "*.safetensors")
        if options:  # transformers may keep the weights packed otherwise, which is another model to measure
            options["quantization_config"] = GgufConfig(dequantize=True)
        with _named(option, name):
            model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **options)
        models.append(model.to(device).eval())
    return models[0], models[1], load_tokenizer(target)


@contextmanager
def _named(option: str, name: str) -> Iterator[None]:
    """What cannot be read, by its option."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise FileNotFoundError(f"{option} {name}: {str(error).splitlines()[0]}") from error


def load_tokenizer(target: str) -> Any:
    """The target's tokenizer, which is loaded sooner than its weights.

    Raises:
        FileNotFoundError: if there is none.
    """
    with _named("--target", target):
        return AutoTokenizer.from_pretrained(target, **_gguf(target, "tokenizer.json"))


def _gguf(name: str, unless: str) -> dict[str, Any]:
    """The argument for a folder's GGUF file; nothing where the folder holds what is better, or no such file."""
    files = list(Path(name).glob("*.gguf"))
    return {"gguf_file": files[0].name} if len(files) == 1 and not list(Path(name).glob(unless)) else {}


def read_texts(folder: Path, tokenizer: Any) -> dict[str, list[int]]:
    """Token ids of every `.txt` and `.txt.gz` file of a folder, by file name, in order of the names.

    Raises:
        FileNotFoundError: if there is none.
    """
    paths = sorted(path for path in folder.glob("*") if path.name.endswith((".txt", ".txt.gz")))
    if not paths:
        raise FileNotFoundError(f"--texts {folder} holds no .txt or .txt.gz files")
    texts = [
        (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode() for path in paths
    ]
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return {path.name: row for path, row in zip(paths, ids)}


def row_lengths(context: int, batch: int, ragged: bool) -> list[int]:
    """Tokens of each row: all of the context, or where `ragged`, from half of it up."""
    if not ragged:
        return [context] * batch
    return [context - (context - context // 2) * (batch - 1 - i) // max(1, batch - 1) for i in range(batch)]


def cut_prompts(texts: Mapping[str, Sequence[int]], lengths: Sequence[int], front: Sequence[int] = ()) -> list[Prompt]:
    """One prompt for each length: one from each file in turn, spread over the file, none overlapping another.

    Each starts with the tokens of `front`, which its length counts.

    Raises:
        ValueError: if the texts are too short.
    """
    window, needed = max(lengths) - len(front), len(lengths)
    if min(lengths) <= len(front):
        raise ValueError(f"`lengths` must be above the {len(front)} tokens that start a text, got {min(lengths)}")
    room = {name: len(tokens) // window for name, tokens in texts.items()}
    if sum(room.values()) < needed:
        raise ValueError(
            f"{needed} prompts of {window:,} tokens are needed, the texts hold {sum(room.values())} without overlap: "
            "give more text with --texts, or lower --context or --batch"
        )
    turns = [(name, i) for i in range(max(room.values())) for name in texts if i < room[name]][:needed]
    taken = {name: sum(name == other for other, _ in turns) for name in texts}
    prompts = []
    for (name, i), length in zip(turns, lengths):
        gap = (len(texts[name]) - taken[name] * window) // (taken[name] + 1)
        start = gap + i * (window + gap)
        prompts.append(Prompt(name, start, [*front, *texts[name][start : start + length - len(front)]]))
    return prompts


def old_shares(prompt: Sequence[int], new: Sequence[int]) -> tuple[float, float]:
    """Shares of the 8-grams of `new` that occur in the prompt (copied), and that `new` has held before (repeated).

    Tokens of the prompt and of `new` never count as one 8-gram.

    Raises:
        ValueError: if `new` has no 8-gram.
    """
    grams = _grams(new)
    if not grams:
        raise ValueError(f"shares of {NGRAM}-grams need at least {NGRAM} new tokens, got {len(new)}")
    held = set(_grams(prompt))
    return sum(gram in held for gram in grams) / len(grams), 1 - len(set(grams)) / len(grams)


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[i:] for i in range(NGRAM))))
