"""DustinProfile: which heads of a target-draft pair estimate attention, and how the budget is split between them."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_hf.config import check_num_assistant_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROFILE_NAME = "dustin_profile.json"
SCHEMA_VERSION = 1

Heads = dict[int, tuple[int, ...]]

_IDENTITY = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)


def config_hash(config: "PreTrainedConfig") -> str:
    """Hash of the shape of a model (sizes, heads, vocabulary): equal for a base model and its fine-tunes."""
    values = {name: getattr(config, name, None) for name in _IDENTITY}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class DustinProfile:
    """What the offline search found for one target-draft pair.

    Args:
        target_heads (`dict[int, tuple[int, ...]]`): query heads of each target layer whose last attention is scored.
        draft_heads (`dict[int, tuple[int, ...]]`): query heads of each draft layer whose lookahead is scored.
        draft_share (`float`): m / k, the share of the budget that follows the draft.
        num_assistant_tokens (`int`, *optional*): the gamma it was made for.
        target_hash (`str`, *optional*): `config_hash` of the target; None fits any model.
        draft_hash (`str`, *optional*): `config_hash` of the draft; None fits any model.

    Raises:
        ValueError: on a share out of range, no heads at all, or an unknown schema version.
    """

    target_heads: Heads
    draft_heads: Heads
    draft_share: float = 0.75
    num_assistant_tokens: int | None = None
    target_hash: str | None = None
    draft_hash: str | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"`schema_version` of a profile must be {SCHEMA_VERSION}, got {self.schema_version!r}: "
                "make the profile again, or use the dustin_hf release that made it"
            )
        if not 0 <= self.draft_share <= 1:
            raise ValueError(f"`draft_share` must be between 0 and 1, got {self.draft_share!r}")
        check_num_assistant_tokens(self.num_assistant_tokens)
        for name in ("target_heads", "draft_heads"):
            heads = {int(layer): tuple(int(h) for h in chosen) for layer, chosen in getattr(self, name).items()}
            if not heads or not all(heads.values()):
                raise ValueError(f"`{name}` must name at least one head in each of its layers, got {heads}")
            object.__setattr__(self, name, heads)

    @classmethod
    def default(cls, target: "PreTrainedConfig", draft: "PreTrainedConfig") -> "DustinProfile":
        """The profile of a pair that was never searched: all heads of one layer at 60 % of the depth of each model.

        Layers from the middle to two thirds of the depth score best in searches, and one draft layer brings nearly
        all that several bring (ours).
        """

        def middle(config: "PreTrainedConfig") -> Heads:
            return {int(0.6 * config.num_hidden_layers): tuple(range(config.num_attention_heads))}

        return cls(target_heads=middle(target), draft_heads=middle(draft))

    def check_pair(self, target: "PreTrainedConfig", draft: "PreTrainedConfig | None") -> None:
        """Raise `ValueError` unless this profile was made for models of these shapes; without a draft, the target's."""
        for name, wanted, config, heads in (
            ("target", self.target_hash, target, self.target_heads),
            ("draft", self.draft_hash, draft, self.draft_heads),
        ):
            if config is None:
                continue
            found = config_hash(config)
            if wanted is not None and wanted != found:
                raise ValueError(
                    f"`profile` was made for another {name}: config hash {wanted}, this model has {found}; "
                    "make one for this pair, or leave `profile` out to use the default"
                )
            for layer, chosen in heads.items():
                if not 0 <= layer < config.num_hidden_layers or not all(
                    0 <= head < config.num_attention_heads for head in chosen
                ):
                    raise ValueError(
                        f"`profile` names heads {chosen} of {name} layer {layer}, but this model has "
                        f"{config.num_hidden_layers} layers of {config.num_attention_heads} heads"
                    )

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write `dustin_profile.json` into `folder` (made if absent) and return its path."""
        path = Path(folder) / PROFILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        return path

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **hub_kwargs: Any) -> "DustinProfile":
        """Read a profile from a folder, a JSON file, or a Hub repository (`hub_kwargs` go to `hf_hub_download`).

        Raises:
            ValueError: if the file is no profile of a known schema.
        """
        path = Path(name_or_path)
        if path.is_dir():
            path = path / PROFILE_NAME
        if not path.is_file():
            from huggingface_hub import hf_hub_download

            path = Path(hf_hub_download(str(name_or_path), PROFILE_NAME, **hub_kwargs))
        try:
            return cls(**json.loads(path.read_text()))
        except (TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"`profile` {path} is not a Dustin profile: {error}") from error
