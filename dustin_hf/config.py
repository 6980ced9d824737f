"""DustinConfig: the options a user gives as `cache_config`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

DEFAULT_NUM_ASSISTANT_TOKENS = 4  # paper table 5: gamma 3 or 4
DRAFT_CACHES = ("auto", "full", "streaming", "sparse")
BACKENDS = ("auto", "graph", "compiled", "eager")


@dataclass(frozen=True, slots=True)
class DustinConfig:
    """How verification chooses what it reads, and how drafts are made.

    Args:
        budget (`int`): cached tokens that verification attends to in each row (k), protected tokens included. The
            tokens of the block being verified come on top. A budget of at least the length is exact.
        sinks (`int`): first tokens of each row, always kept (paper appendix C: 4).
        window (`int`): last cached tokens of each row, always kept (paper appendix C: 16).
        draft_share (`float`, *optional*): share of the budget given to the draft's lookahead attention (m / k).
            Default: the profile's.
        num_assistant_tokens (`int`, *optional*): drafted tokens per step (gamma). `generate(num_assistant_tokens=)`
            wins over it; without either the profile's, the assistant's generation config's, or 4.
        draft_cache (`str`): what the draft attends to: `"full"` (the paper's setting), `"streaming"` (sinks and the
            most recent tokens, `budget` in all), `"sparse"` (the tokens that the draft's last scores chose and all that
            came after, `budget` in all), or `"auto"`: sparse where the draft is scored, else full; streaming where the
            target drafts for itself.
        backend (`str`): what runs the steps: `"graph"` (CUDA graphs), `"compiled"` (the fused forward, or where a model
            has none its own through `torch.compile`, not captured), `"eager"` (op by op, the model's own forward), or
            `"auto"`: the first that can be had. The statistics say which it was, and why.
        mode (`str`): selection policy: `"hybrid"` (Dustin-H), `"target"` (Dustin-T), `"draft"` (Dustin-D), `"full"`.

    Raises:
        ValueError: on a value out of range.
    """

    budget: int = 512
    sinks: int = 4
    window: int = 16
    draft_share: float | None = None
    num_assistant_tokens: int | None = None
    draft_cache: str = "auto"
    mode: str = "hybrid"
    backend: str = "auto"

    def __post_init__(self) -> None:
        from dustin_hf.selection import policy_names

        for name in ("budget", "sinks", "window"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"`{name}` must be a non-negative integer, got {value!r}")
        if self.budget < self.sinks + self.window + 1:
            raise ValueError(
                f"`budget` must be at least sinks + window + 1 = {self.sinks + self.window + 1}, got {self.budget}; "
                "protected tokens count in the budget: raise it, or lower `sinks` or `window`"
            )
        share = self.draft_share
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1):
            raise ValueError(f"`draft_share` must be between 0 and 1, got {self.draft_share!r}")
        check_num_assistant_tokens(self.num_assistant_tokens)
        if self.draft_cache not in DRAFT_CACHES:
            raise ValueError(f"`draft_cache` must be one of {DRAFT_CACHES}, got {self.draft_cache!r}")
        if self.backend not in BACKENDS:
            raise ValueError(f"`backend` must be one of {BACKENDS}, got {self.backend!r}")
        if self.draft_cache == "sparse" and self.mode in ("target", "full"):
            raise ValueError(
                f"`draft_cache='sparse'` follows the draft's scores, which mode {self.mode!r} does not make: "
                "use mode 'hybrid' or 'draft', or another draft cache"
            )
        if self.mode not in policy_names():
            raise ValueError(f"`mode` must be one of {policy_names()}, got {self.mode!r}")

    @classmethod
    def from_cache_config(cls, cache_config: "dict[str, Any] | DustinConfig | None") -> "DustinConfig":
        """Build from the `cache_config` of `generate`, which may be one of these already.

        Raises:
            ValueError: on keys that are not fields of this class (the message lists them), or values out of range.
        """
        if isinstance(cache_config, DustinConfig):
            return cache_config
        if not isinstance(cache_config, Mapping | None):
            raise ValueError(f"`cache_config` must be a dict or a DustinConfig, got {type(cache_config).__name__}")
        cache_config = {} if cache_config is None else dict(cache_config)
        known = [f.name for f in fields(cls)]
        unknown = sorted(map(str, set(cache_config) - set(known)))
        if unknown:
            raise ValueError(f"`cache_config` has unknown keys {unknown}; with 'dustin' it takes {known}")
        return cls(**cache_config)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready to be given as `cache_config` again."""
        return asdict(self)


def check_num_assistant_tokens(value: int | None) -> None:
    """Raise `ValueError` unless `value` is None or a positive integer."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"`num_assistant_tokens` must be a positive integer, got {value!r}")
