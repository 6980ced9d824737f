"""Traces: what the target attended to in windows of its greedy continuations, and what both signals said before."""

import errno
import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dustin_hf.held import differing, write_file
from dustin_hf.model_patches.families import ModelFamily
from dustin_hf.profile import Heads, config_hash
from dustin_hf.profiling.recovery import Sample
from dustin_hf.profiling.windows import trace_samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Candidate = tuple[int, tuple[int, ...]]
Progress = Callable[[str, int, int], None]

INDEX_NAME = "index.json"


def as_candidates(*heads: Heads) -> tuple[Candidate, ...]:
    """One candidate, a layer and query heads of it, for each layer of each set of heads, in that order, none twice."""
    found = [(layer, tuple(chosen)) for one in heads for layer, chosen in sorted(one.items())]
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """What is recorded.

    Args:
        target: candidates whose history is scored.
        draft: candidates whose lookahead is scored.
        window: tokens of a window (w of paper equation 2).
        new_tokens: most tokens of a continuation.
        stride: tokens from one window to the next, at least `window`. Default: `window`.
        deltas: distances of the histories, in tokens; 1 is the last committed one, which a run has.
        batch_size: samples that are run together. Rounding depends on it, so it belongs to what is recorded.
    """

    target: tuple[Candidate, ...]
    draft: tuple[Candidate, ...]
    window: int = 4
    new_tokens: int = 128
    stride: int | None = None
    deltas: tuple[int, ...] = (1,)
    batch_size: int = 1

    def __post_init__(self) -> None:
        for name in ("target", "draft"):
            wanted = tuple((int(layer), tuple(map(int, chosen))) for layer, chosen in getattr(self, name))
            object.__setattr__(self, name, wanted)
        object.__setattr__(self, "deltas", tuple(self.deltas))
        object.__setattr__(self, "stride", self.window if self.stride is None else self.stride)
        if not self.target or not self.draft:
            raise ValueError("`target` and `draft` must each hold at least one candidate")
        if self.window < 1 or self.step < self.window:
            raise ValueError(f"`stride` must be at least `window`, and that 1, got {self.stride} and {self.window}")
        if self.new_tokens < self.window:
            raise ValueError(f"`new_tokens` must fill a window of {self.window}, got {self.new_tokens}")
        if self.batch_size < 1:
            raise ValueError(f"`batch_size` must be at least 1, got {self.batch_size}")
        if 1 not in self.deltas or min(self.deltas) < 1:
            raise ValueError(f"`deltas` must be positive and hold 1, the history of a run, got {self.deltas}")

    @property
    def step(self) -> int:
        """Tokens from one window to the next."""
        assert self.stride is not None
        return self.stride


class TraceSet:
    """A folder of recorded samples: one safetensors file each, and an index. `ValueError` if it is not complete."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        index = _read_index(self.folder)
        if index is None:
            raise ValueError(f"{self.folder} holds no traces (no {INDEX_NAME}): record some first")
        self.index: dict[str, Any] = index
        self.settings = TraceSettings(**index["settings"])
        self.names: list[str] = index["samples"]
        missing = [name for name in self.names if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(
                f"{self.folder} lacks {len(missing)} of {len(self.names)} samples, first {missing[0]}: "
                "run the recording again, it goes on where it was interrupted"
            )

    def __len__(self) -> int:
        return len(self.names)

    def sample(self, i: int, device: torch.device | str = "cpu") -> Sample:
        """One sample, on a device; its tensors are read when they are asked for."""
        return Sample(self.settings, _Stored(self.folder / self.names[i], str(device)))


class _Stored(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read once it is asked for."""

    def __init__(self, path: Path, device: str):
        self.path, self.device = path, device
        self.read: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.read:
            with self._open() as file:
                self.read[name] = file.get_tensor(name)
        return self.read[name]

    def __iter__(self) -> Iterator[str]:
        with self._open() as file:
            return iter(list(file.keys()))

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self.path, framework="pt", device=self.device) as file:
                yield file
        except SafetensorError as error:
            raise ValueError(f"{self.path} cannot be read ({error}): remove it, it is made again") from error

    def __len__(self) -> int:
        return len(list(iter(self)))


def record(
    target: "PreTrainedModel",
    draft: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    folder: str | Path,
    settings: TraceSettings,
    progress: Progress | None = None,
) -> TraceSet:
    """Record the traces of prompts; a folder with some of them is completed.

    Args:
        target: its greedy continuations are the trajectories.
        draft: teacher-forced on the same tokens.
        prompts: token ids of each sample.
        folder: made if absent.
        settings: what to record.
        progress: called as `progress("traces", done, total)`.

    Raises:
        ValueError: if a prompt does not fit a model, or the folder holds traces made otherwise.
        RuntimeError: if the disk has not enough room. What is finished stays, and is not made again.
    """
    folder = Path(folder)
    lengths = {f"prompt {i}": len(ids) for i, ids in enumerate(prompts)}
    check_lengths(target, draft, lengths, settings.new_tokens, max(settings.deltas) + 1)
    index: dict[str, Any] = {
        "settings": json.loads(json.dumps(asdict(settings))),
        "models": {"target": fingerprint(target), "draft": fingerprint(draft)},
        "samples": [f"{i:04d}-{_digest(ids)}.safetensors" for i, ids in enumerate(prompts)],
    }
    held = _read_index(folder)
    if held is not None:
        if different := differing(held, index):
            raise ValueError(f"{folder} holds traces of other {different}: use another folder, or remove this one")
        index = held
    todo = [i for i, name in enumerate(index["samples"]) if not (folder / name).is_file()]
    wanted = size_estimate(target, [len(prompts[i]) for i in todo], settings)
    with _said_when_full(folder, wanted):
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        if wanted > free:
            raise OSError(errno.ENOSPC, f"{free / 1e9:.1f} GB are free")
        write_file(folder / INDEX_NAME, json.dumps(index, indent=1).encode())
        for begin in range(0, len(prompts), settings.batch_size):
            group = range(begin, min(begin + settings.batch_size, len(prompts)))
            if not any(i in todo for i in group):
                continue
            if progress is not None:
                progress("traces", begin, len(prompts))
            # the whole group, so that an interruption within changes nothing
            samples = trace_samples(target, draft, [prompts[i] for i in group], settings)
            for i, tensors in zip(group, samples):
                write_file(folder / index["samples"][i], save(tensors))
        if progress is not None:
            progress("traces", len(prompts), len(prompts))
    return TraceSet(folder)


def size_estimate(target: "PreTrainedModel", lengths: Iterable[int], settings: TraceSettings) -> int:
    """Bytes that traces of prompts of these lengths take, if no continuation ends early."""
    layers = target.config.get_text_config(decoder=True).num_hidden_layers
    rows = layers + len(settings.deltas) * len(settings.target) + len(settings.draft)
    total = 0
    for length in lengths:
        windows = (settings.new_tokens - settings.window) // settings.step + 1
        last = length + (windows - 1) * settings.step
        total += windows * (rows * last * 2 + layers * 4 + 8)
    return total


def check_lengths(
    target: "PreTrainedModel", draft: "PreTrainedModel", lengths: Mapping[str, int], new_tokens: int, shortest: int = 2
) -> None:
    """Raise `ValueError` unless both models have room for every prompt (by name) and its continuation."""
    for prompt, length in lengths.items():
        if length < shortest:
            raise ValueError(f"{prompt} has {length} tokens; histories need at least {shortest}: leave it out")
        for name, model in (("target", target), ("draft", draft)):
            limit = ModelFamily.positions(model.config.get_text_config(decoder=True))
            if length + new_tokens > limit:
                raise ValueError(
                    f"{prompt} has {length} tokens, with {new_tokens} new ones more than the {limit} positions of the "
                    f"{name}: cut it (`max_context`), or configure the model for longer contexts"
                )


def fingerprint(model: "PreTrainedModel") -> dict[str, str]:
    """What tells one model from another: its name, the hash of its shape, and a hash of a few of its weights."""
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode())
        digest.update(weight.detach().flatten()[:8].float().cpu().numpy().tobytes())
    config = model.config.get_text_config(decoder=True)
    return {
        "id": model.config._name_or_path or config.model_type,
        "hash": config_hash(config),
        "weights": digest.hexdigest()[:16],
    }


@contextmanager
def _said_when_full(folder: Path, wanted: int) -> Iterator[None]:
    """Say in words that a disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise RuntimeError(
            f"the disk of {folder} is full ({error.strerror}): these traces need {wanted / 1e9:.2f} GB. Free some, or "
            "record fewer windows (`stride`, `new_tokens`); finished samples are kept"
        ) from error


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(map(int, ids))).encode()).hexdigest()[:8]


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / INDEX_NAME
    return json.loads(path.read_text()) if path.is_file() else None
