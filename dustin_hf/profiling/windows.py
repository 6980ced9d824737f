"""The windows of some samples, run together: what the target attended to, and what both signals said before."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dustin_hf.cache import DustinCache
from dustin_hf.enabling import enable
from dustin_hf.forward import input_device
from dustin_hf.model_patches.families import family_of
from dustin_hf.prefill import prefill
from dustin_hf.profile import Heads
from dustin_hf.profiling.recovery import SCALE
from dustin_hf.profiling.rows import all_heads, attention_rows, tapped_block
from dustin_hf.scoring import HeadScorer, Queries

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from dustin_hf.profiling.traces import Candidate, TraceSettings


@torch.no_grad()
def trace_samples(
    target: "PreTrainedModel", draft: "PreTrainedModel", prompts: Sequence[Sequence[int]], settings: "TraceSettings"
) -> list[dict[str, torch.Tensor]]:
    """The tensors of each sample. Memory: both caches in turn, and the attention rows of one window, row and layer.

    Returns:
        For each prompt `tokens [N]` and `prompt_length`; for its `W` windows: `lengths [W]`, `truth [W, layers, T]`
        and `history [deltas, W, C, T]` and `lookahead [W, C, T]` (float16 means times `SCALE`), `new_mass [W, layers]`.
    """
    with enable(target):
        new, cache = greedy_continuations(target, prompts, settings.new_tokens, settings.step)
        rows = _Rows([[*ids, *more] for ids, more in zip(prompts, new)], [len(ids) for ids in prompts], settings)
        found = _target_windows(target, cache, rows, settings)
        del cache  # before the draft has one
    with enable(draft):
        for sample, lookahead in zip(found, _draft_windows(draft, rows, settings)):
            sample["lookahead"] = lookahead
    for sample, tokens, starts, length in zip(found, rows.tokens, rows.starts, rows.prompts):
        sample["lengths"] = torch.tensor(starts, dtype=torch.long)
        sample["tokens"], sample["prompt_length"] = torch.tensor(tokens), torch.tensor(length)
    return found


class _Rows:
    """Samples that are run together: their tokens, lengths of their prompts, and starts of their windows."""

    def __init__(self, tokens: list[list[int]], prompts: list[int], settings: "TraceSettings"):
        self.tokens, self.prompts, self.step = tokens, prompts, settings.step
        self.starts = [
            list(range(length, len(row) - settings.window + 1, settings.step)) for row, length in zip(tokens, prompts)
        ]
        self.windows = max(map(len, self.starts))
        self.widths = [starts[-1] if starts else 0 for starts in self.starts]
        # rows with fewer windows than others run on, over whatever
        self.capacity = max(prompts) + self.windows * settings.step

    def cut(self, offset: int, count: int, vocabulary: int) -> torch.Tensor:
        """The `count` tokens of each row from `offset` after its prompt on, `[B, count]`; zeros after its end."""
        begins = [length + offset for length in self.prompts]
        parts = [row[begin : begin + count] for row, begin in zip(self.tokens, begins)]
        padded = torch.tensor([part + [0] * (count - len(part)) for part in parts])
        # the target may have a larger padding of the vocabulary than the draft
        return padded.clamp(max=vocabulary - 1)


def greedy_continuations(
    model: "PreTrainedModel", prompts: Sequence[Sequence[int]], new_tokens: int, spare: int = 0
) -> tuple[list[list[int]], DustinCache]:
    """Up to `new_tokens` tokens of the model's own choice for each prompt, the one that ends a text included.

    The model must be enabled. Its cache comes back too, with room for `spare` tokens more.
    """
    lengths = [len(ids) for ids in prompts]
    cache = _prefilled(model, prompts, [length - 1 for length in lengths], max(lengths) + new_tokens + spare)
    ends = getattr(model.generation_config, "eos_token_id", None)
    stops = set(ends if isinstance(ends, list) else [ends])
    found: list[list[int]] = [[] for _ in prompts]
    last = torch.tensor([[ids[-1]] for ids in prompts])
    for _ in range(new_tokens):
        logits, _ = _block(model, cache, last, {})
        last = logits[:, -1].argmax(-1, keepdim=True)
        for tokens, (token,) in zip(found, last.tolist()):
            if not tokens or tokens[-1] not in stops:
                tokens.append(token)
        if all(tokens[-1] in stops for tokens in found):
            break
    return found, cache


def _target_windows(
    model: "PreTrainedModel", cache: DustinCache, rows: _Rows, settings: "TraceSettings"
) -> list[dict[str, torch.Tensor]]:
    """Truth, new mass and histories of each row's windows; the cache holds the prompts, and goes over the rest anew."""
    config = model.config.get_text_config(decoder=True)
    heads, scale, size = all_heads(model), family_of(config).scale(config), config.vocab_size
    tail, window = max(settings.deltas), settings.window
    found = [
        {
            "truth": torch.zeros(len(starts), len(heads), width, dtype=torch.float16),
            "new_mass": torch.zeros(len(starts), len(heads)),
            "history": torch.zeros(len(settings.deltas), len(starts), len(settings.target), width, dtype=torch.float16),
        }
        for starts, width in zip(rows.starts, rows.widths)
    ]
    cache.lengths = torch.tensor(rows.prompts, device=cache.lengths.device) - tail
    recent = _block(model, cache, rows.cut(-tail, tail, size), heads)[1]
    for i in range(rows.windows):
        here = [b for b, starts in enumerate(rows.starts) if i < len(starts)]
        starts = cache.lengths.clone()
        for d, delta in enumerate(settings.deltas):
            # an earlier query has seen what was there by then, itself included
            asked = {layer: q[:, tail - delta : tail - delta + 1] for layer, q in recent.items()}
            scores = _scores(model, cache, asked, starts - delta + 1, settings.target, int(starts.max()))
            for b in here:
                found[b]["history"][d, i, :, : rows.starts[b][i]] = scores[b, :, : rows.starts[b][i]]
        queries = _block(model, cache, rows.cut(i * rows.step, rows.step, size), heads)[1]
        for b in here:
            start = rows.starts[b][i]
            truth, new_mass = [], []
            for layer, q in queries.items():
                shares = attention_rows(q[b, :window], cache.layers[layer].keys[b], start, scale)  # [HQ, w, start + w]
                truth.append((shares[:, :, :start].mean((0, 1)) * SCALE).half().to(cache.lengths.device))
                new_mass.append(shares[:, :, start:].sum(-1).mean().to(cache.lengths.device))
            found[b]["truth"][i, :, :start] = torch.stack(truth).cpu()
            found[b]["new_mass"][i] = torch.stack(new_mass).cpu()
        recent = {layer: torch.cat([recent[layer], q], dim=1)[:, -tail:] for layer, q in queries.items()}
    return found


def _draft_windows(model: "PreTrainedModel", rows: _Rows, settings: "TraceSettings") -> list[torch.Tensor]:
    """Lookahead of each row's windows: the draft's queries at their positions, each over the committed tokens alone."""
    size = model.config.get_text_config(decoder=True).vocab_size
    heads = {layer: all_heads(model)[layer] for layer, _ in settings.draft}
    found = [
        torch.zeros(len(starts), len(settings.draft), width, dtype=torch.float16)
        for starts, width in zip(rows.starts, rows.widths)
    ]
    tokens = [[min(token, size - 1) for token in row] for row in rows.tokens]
    cache = _prefilled(model, tokens, rows.prompts, rows.capacity)
    for i in range(rows.windows):
        starts = cache.lengths.clone()
        queries = _block(model, cache, rows.cut(i * rows.step, rows.step, size), heads)[1]
        asked = {layer: q[:, : settings.window] for layer, q in queries.items()}
        scores = _scores(model, cache, asked, starts, settings.draft, int(starts.max()))
        for b, begins in enumerate(rows.starts):
            if i < len(begins):
                found[b][i, :, : begins[i]] = scores[b, :, : begins[i]]
    return found


def _scores(
    model: "PreTrainedModel",
    cache: DustinCache,
    queries: Queries,
    lengths: torch.Tensor,
    candidates: tuple["Candidate", ...],
    width: int,
) -> torch.Tensor:
    """Scores of each candidate by the scorer that runs online (paper equation 5), as stored: `[B, C, T]` on the CPU.

    Args:
        model: whose queries they are.
        cache: its cache.
        queries: layer -> all heads' queries, `[B, n, HQ, D]`.
        lengths: committed tokens, `[B]`.
        candidates: layers and heads.
        width: slots to return (T).
    """
    config = model.config.get_text_config(decoder=True)
    family = family_of(config)
    found = []
    for layer, heads in candidates:
        q = queries[layer][:, :, list(heads)]
        at, counts = lengths.to(q.device), torch.full_like(lengths, q.shape[1]).to(q.device)
        scorer = HeadScorer({layer: heads}, family.group(config), family.scale(config))
        total = scorer({layer: q}, cache, at, counts)[:, :width]
        found.append((total * (SCALE / (len(heads) * q.shape[1]))).half().to(lengths.device))
    return torch.stack(found, dim=1).cpu()


def _prefilled(
    model: "PreTrainedModel", tokens: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int
) -> DustinCache:
    """A cache that holds the first `lengths[b]` tokens of each row, and has room for `capacity` in all."""
    device = input_device(model)
    cache = DustinCache(model.config.get_text_config(decoder=True).num_hidden_layers, len(tokens), capacity, device)
    # `prefill` leaves the last token of what it is given
    pads = [max(lengths) - length for length in lengths]
    padded = [[0] * pad + list(row[: length + 1]) for row, length, pad in zip(tokens, lengths, pads)]
    prefill(model, cache, torch.tensor(padded, device=device), pads, [0] * len(pads))
    return cache


def _block(
    model: "PreTrainedModel", cache: DustinCache, tokens: torch.Tensor, heads: Heads
) -> tuple[torch.Tensor, Queries]:
    """Run a block of every row and commit it."""
    out = tapped_block(model, cache, tokens.to(cache.lengths.device), heads=heads, logits_to_keep=1)
    cache.lengths = cache.lengths + tokens.shape[1]
    return out
