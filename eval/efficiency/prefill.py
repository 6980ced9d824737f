"""`bench prefill`: prompts into a cache, ours by chunk size beside stock, on random weights."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

import dustin_hf
from dustin_hf._compat import CACHE_ARG
from dustin_hf.cache import DustinCache
from dustin_hf.eval.efficiency.decode import random_model
from dustin_hf.eval.efficiency.record import conditions
from dustin_hf.eval.efficiency.shapes import Shape
from dustin_hf.eval.efficiency.timing import check_cuda
from dustin_hf.prefill import prefill
from dustin_hf.tables import show

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()
def run_prefill(
    shape: Shape,
    context: int,
    rows: int,
    batch: int,
    chunks: Sequence[int],
    command: str,
    progress: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Time the prefill of `rows` prompts of one length, stock and ours, and ours for a whole batch.

    Args:
        shape: of the model.
        context: tokens of each prompt.
        rows: prompts of the comparison; stock takes them one by one, and two at once.
        batch: prompts of the last row of the table, at the default chunk.
        chunks: tokens per forward to try, besides the default.
        command: for the record.
        progress: is told what comes next.

    Returns:
        Ready for JSON: `rows` with `seconds`, `tokens_per_s`, `peak_gb` (weights and cache included) and the speed over
        the better stock arm.

    Raises:
        ValueError: without a CUDA device.
    """
    check_cuda()
    say = progress or (lambda text: None)
    model = random_model(shape)
    ids = torch.randint(3, shape.vocab, (max(rows, batch), context + 1), device="cuda")
    table: list[dict[str, Any]] = []
    _stock(model, ids[:1, :1000], 1)  # warm-up
    with dustin_hf.enable(model):
        for together in (1, 2):
            say(f"stock, {together} at once")
            table.append(
                _timed(
                    f"stock, {together} at once", rows, context, functools.partial(_stock, model, ids[:rows], together)
                )
            )
        best = max(row["tokens_per_s"] for row in table)
        cache = DustinCache(shape.layers, rows, context + 8, "cuda")
        _ours(model, cache, ids[:rows, :1000], None)
        for chunk in [None, *chunks]:
            name = f"ours, chunks of {chunk:,}" if chunk else "ours, default chunks"
            say(name)
            row = _timed(name, rows, context, functools.partial(_ours, model, cache, ids[:rows], chunk))
            table.append({**row, "over_stock": row["tokens_per_s"] / best})
        del cache
        torch.cuda.empty_cache()
        say(f"ours, {batch} rows")
        cache = DustinCache(shape.layers, batch, context + 8, "cuda")
        table.append(
            _timed(f"ours, {batch} rows", batch, context, functools.partial(_ours, model, cache, ids[:batch], None))
        )
    return {
        "bench": "prefill",
        "target": shape.name,
        "context": context,
        "rows": table,
        "notes": "Random weights, bfloat16; no logits are computed on either side. Single runs after a warm-up.",
        "conditions": conditions(command),
    }


def report(result: dict[str, Any]) -> None:
    """Print the table."""
    columns = ("arm", "rows", "s", "tokens/s", "peak GB", "x stock")
    lines = [
        (
            row["arm"],
            str(row["prompts"]),
            f"{row['seconds']:.2f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['peak_gb']:.1f}",
            f"{row['over_stock']:.2f}" if "over_stock" in row else "-",
        )
        for row in result["rows"]
    ]
    show(f"prefill of {result['target']}, {result['context']:,} tokens a row", columns, lines)


def _timed(arm: str, prompts: int, context: int, run: Callable[[], object]) -> dict[str, Any]:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() / 1e9
    return {
        "arm": arm,
        "prompts": prompts,
        "seconds": seconds,
        "tokens_per_s": prompts * context / seconds,
        "peak_gb": peak,
    }


def _stock(model: "PreTrainedModel", ids: torch.Tensor, together: int) -> None:
    decoder: Any = model.get_decoder()
    for begin in range(0, len(ids), together):
        decoder(ids[begin : begin + together, :-1], use_cache=True, **{CACHE_ARG: DynamicCache()})


def _ours(model: "PreTrainedModel", cache: DustinCache, ids: torch.Tensor, chunk: int | None) -> None:
    cache.reset()
    prefill(model, cache, ids, [0] * len(ids), [0] * len(ids), chunk)
