"""How far the retrieval heads of a model depend on the needle samples that they were found with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dustin_hf.profile import Heads
from dustin_hf.profiling.identify import best_heads, overlap, score_heads
from dustin_hf.profiling.needles import NeedleSample, needle_samples

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Needles:
    """The samples of a model, and the heads that they rank best.

    Args:
        model: whose heads they are.
        tokenizer: of the model.
        texts: haystacks, by name.
        lengths: tokens of the samples.
        count: heads of a layer.
        seed: of the samples.
        state_path: keeps the scores of finished samples.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    texts: Mapping[str, str]
    lengths: Sequence[int]
    count: int
    seed: int
    state_path: Path

    def samples(self, names: Sequence[str] | None = None, seed: int = 0) -> list[NeedleSample]:
        """Of some texts, all by default; `seed` on top of the own one."""
        texts = self.texts if names is None else {name: self.texts[name] for name in names}
        return needle_samples(texts, self.tokenizer, self.lengths, seed=self.seed + seed)

    def heads(self, samples: Sequence[NeedleSample], progress: Callable[[int, int], None] | None = None) -> Heads:
        """The best heads of each layer."""
        return best_heads(score_heads(self.model, samples, progress, self.state_path), self.count)


def stability(
    needles: Needles, layers: Sequence[int], progress: Callable[[int, int], None] | None = None
) -> dict[str, dict[str, float]]:
    """Overlap of the heads with those that other samples rank best (ours).

    Args:
        needles: the samples of the study.
        layers: those that the profile uses.
        progress: called with the number of samples done and of all, for each set of samples anew.

    Returns:
        `all` (layers) and `profile` (its layers only), each with `haystacks` (two halves of the texts against each
        other, where both are long enough), `seed` (other facts and places), `count` (half the samples) and `length N`
        (those of one length alone), the last three against the study's own heads; 0 to 1.
    """
    own, names = needles.samples(), sorted(needles.texts)
    sets = {"seed": needles.samples(seed=1), "count": own[::2]}
    sets |= {f"length {n}": [sample for sample in own if sample.length == n] for n in needles.lengths}
    pairs = {name: (own, other) for name, other in sets.items()}
    try:
        pairs["haystacks"] = needles.samples(names[::2]), needles.samples(names[1::2])
    except ValueError:
        pass  # half of the texts is shorter than a sample
    found: dict[str, dict[str, float]] = {"all": {}, "profile": {}}
    for name, pair in pairs.items():
        first, second = (needles.heads(samples, progress) for samples in pair)
        found["all"][name] = overlap(first, second)
        found["profile"][name] = overlap(*({layer: heads[layer] for layer in layers} for heads in (first, second)))
    return found
