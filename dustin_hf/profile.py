"""DustinProfile: which heads of a target-draft pair estimate attention, and how the budget is split between them."""

import hashlib
import json
import operator
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dustin_hf.cards import GENERATED, PLOTS_NAME, model_card
from dustin_hf.config import check_num_assistant_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PROFILE_NAME = "dustin_profile.json"
CARD_NAME = "README.md"
SCHEMA_VERSION = 1
SHIPPED = Path(__file__).parent / "profiles"

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


def _checked_heads(name: str, heads: Heads) -> Heads:
    try:  # layers are text in JSON
        found = {int(layer): tuple(operator.index(head) for head in chosen) for layer, chosen in heads.items()}
    except (AttributeError, TypeError) as error:
        raise ValueError(f"`{name}` must map layers to whole numbers, its heads, got {heads!r}") from error
    if not found or not all(found.values()):
        raise ValueError(f"`{name}` must name at least one head in each of its layers, got {found}")
    if any(len(set(chosen)) < len(chosen) for chosen in found.values()):
        raise ValueError(f"`{name}` must name each head once, got {found}")
    return found


def _checked_shares(share: float, shares: dict[int, float]) -> dict[int, float]:
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise ValueError(f"`draft_share` must be between 0 and 1, got {share!r}")
    found = {int(budget): float(share) for budget, share in shares.items()}
    if not all(budget > 0 and 0 <= share <= 1 for budget, share in found.items()):
        raise ValueError(f"`draft_shares` must map budgets to shares between 0 and 1, got {found}")
    return found


def _nearest_share(share: float, shares: dict[int, float], budget: int) -> float:
    """The share m / k of the nearest budget that was searched, by their ratio; `share` without any."""
    if not shares:
        return share
    return shares[min(shares, key=lambda known: (max(known, budget) / max(1, min(known, budget)), known))]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Heads and splits that choose the slots of some target layers only (ours; the paper has one set for all).

    Args:
        first_layer (`int`): the target layer with which the group begins; it ends where the next one begins.
        target_heads, draft_heads, draft_share, draft_shares: as of a `DustinProfile`.
    """

    first_layer: int
    target_heads: Heads
    draft_heads: Heads
    draft_share: float = 0.75
    draft_shares: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_shares", _checked_shares(self.draft_share, self.draft_shares))
        for name in ("target_heads", "draft_heads"):
            object.__setattr__(self, name, _checked_heads(name, getattr(self, name)))

    def share_for(self, budget: int) -> float:
        """As of a `DustinProfile`."""
        return _nearest_share(self.draft_share, self.draft_shares, budget)


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
        draft_shares (`dict[int, float]`): m / k found for each budget k that was searched.
        layer_groups (`tuple[LayerGroup, ...]`): where groups of target layers have sets of their own, those groups,
            from layer 0 on; heads of a layer are the same in all of them. Without any, all layers share one set.
        metadata (`dict`): how it was made, for people: models, recovery rates, calibration, versions, date. Only what
            JSON can hold, with strings as keys.

    Raises:
        ValueError: on a share out of range, no heads at all, layer groups that do not fit together, or an unknown
            schema version.
    """

    target_heads: Heads
    draft_heads: Heads
    draft_share: float = 0.75
    num_assistant_tokens: int | None = None
    target_hash: str | None = None
    draft_hash: str | None = None
    schema_version: int = SCHEMA_VERSION
    draft_shares: dict[int, float] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    layer_groups: tuple[LayerGroup, ...] = ()

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ValueError(
                f"`schema_version` of a profile must be {SCHEMA_VERSION}, got {self.schema_version!r}: "
                "make the profile again, or use the dustin_hf release that made it"
            )
        object.__setattr__(self, "draft_shares", _checked_shares(self.draft_share, self.draft_shares))
        check_num_assistant_tokens(self.num_assistant_tokens)
        if not isinstance(self.metadata, dict):
            raise ValueError(f"`metadata` must be a dict, got {type(self.metadata).__name__}")
        for name in ("target_heads", "draft_heads"):
            object.__setattr__(self, name, _checked_heads(name, getattr(self, name)))
        groups = tuple(LayerGroup(**x) if isinstance(x, dict) else x for x in self.layer_groups)
        object.__setattr__(self, "layer_groups", groups)
        self._check_groups()

    def _check_groups(self) -> None:
        begins = [group.first_layer for group in self.layer_groups]
        if begins and (begins[0] != 0 or begins != sorted(set(begins))):
            raise ValueError(f"`layer_groups` must begin at layer 0 and go on in order, got first layers {begins}")
        for name in ("target_heads", "draft_heads"):
            known: Heads = {}
            for group in self.layer_groups:
                for layer, chosen in getattr(group, name).items():
                    if known.setdefault(layer, chosen) != chosen:
                        raise ValueError(
                            f"`layer_groups` must agree on the `{name}` of a layer, got {known[layer]} and {chosen} "
                            f"in layer {layer}"
                        )

    @classmethod
    def default(cls, target: "PreTrainedConfig", draft: "PreTrainedConfig") -> "DustinProfile":
        """The profile of a pair that was never searched: all heads of one layer at 60 % of the depth of each model.

        Layers from the middle to two thirds of the depth score best in searches, and one draft layer brings nearly
        all that several bring (ours).
        """

        def middle(config: "PreTrainedConfig") -> Heads:
            return {int(0.6 * config.num_hidden_layers): tuple(range(config.num_attention_heads))}

        return cls(target_heads=middle(target), draft_heads=middle(draft))

    @classmethod
    def shipped(cls, target: "PreTrainedConfig", draft: "PreTrainedConfig") -> "DustinProfile | None":
        """The profile that this package has for models of these shapes, fine-tunes included; None if it has none.

        `enable` without a profile uses it.
        """
        wanted = config_hash(target), config_hash(draft)
        return next((found for found in _all_shipped() if (found.target_hash, found.draft_hash) == wanted), None)

    @classmethod
    def of_pair(cls, target: "PreTrainedConfig", draft: "PreTrainedConfig") -> "DustinProfile":
        """The profile that this package has for the pair, else one that fits any."""
        return cls.shipped(target, draft) or cls.default(target, draft)

    def check_pair(self, target: "PreTrainedConfig", draft: "PreTrainedConfig | None") -> None:
        """Raise `ValueError` unless this profile was made for models of these shapes; without a draft, the target's."""
        everywhere: tuple[DustinProfile | LayerGroup, ...] = (self, *self.layer_groups)
        for name, wanted, config, heads in (
            ("target", self.target_hash, target, [x for part in everywhere for x in part.target_heads.items()]),
            ("draft", self.draft_hash, draft, [x for part in everywhere for x in part.draft_heads.items()]),
        ):
            if config is None:
                continue
            found = config_hash(config)
            if wanted is not None and wanted != found:
                raise ValueError(
                    f"`profile` was made for another {name}: config hash {wanted}, this model has {found}; "
                    "make one for this pair, or leave `profile` out to use the default"
                )
            for layer, chosen in heads:
                if not 0 <= layer < config.num_hidden_layers or not all(
                    0 <= head < config.num_attention_heads for head in chosen
                ):
                    raise ValueError(
                        f"`profile` names heads {chosen} of {name} layer {layer}, but this model has "
                        f"{config.num_hidden_layers} layers of {config.num_attention_heads} heads"
                    )
        if any(group.first_layer >= target.num_hidden_layers for group in self.layer_groups):
            raise ValueError(
                f"`profile` has layer groups that begin at {[group.first_layer for group in self.layer_groups]}, but "
                f"this target has {target.num_hidden_layers} layers"
            )

    def share_for(self, budget: int) -> float:
        """The share m / k of the nearest budget that was searched, by their ratio; `draft_share` without any."""
        return _nearest_share(self.draft_share, self.draft_shares, budget)

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        return asdict(self)

    def save_pretrained(self, folder: str | Path, plots: Iterable[str | Path] = ()) -> Path:
        """Write `dustin_profile.json` and its card `README.md` into `folder` (made if absent).

        A README that this did not write stays as it is.

        Args:
            folder: where to.
            plots: PNG files to be copied into its `plots/`; the card shows all that are there.

        Returns:
            The path of the JSON file.
        """
        path = Path(folder) / PROFILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        shown = path.with_name(PLOTS_NAME)
        for plot in map(Path, plots):
            shown.mkdir(exist_ok=True)
            if plot.resolve() != (shown / plot.name).resolve():
                shutil.copyfile(plot, shown / plot.name)
        card = path.with_name(CARD_NAME)
        if not card.exists() or GENERATED in card.read_text(encoding="utf-8"):
            card.write_text(model_card(self, plots=_pngs(shown)), encoding="utf-8")
        return path

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        plots: Iterable[str | Path] = (),
        **upload_kwargs: Any,
    ) -> str:
        """Upload the profile and its card to a model repository of the Hub, made if absent.

        Args:
            repo_id: `user/name`.
            private: for a new repository.
            token: of the Hub. Default: the one of `hf auth login`.
            plots: PNG files that the card shows.
            upload_kwargs: for `huggingface_hub.upload_folder`: `commit_message`, `revision`, `create_pr`, and so on.

        Returns:
            The address of the commit.
        """
        import huggingface_hub

        repo_id = huggingface_hub.create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as folder:
            card = self.save_pretrained(folder, plots).with_name(CARD_NAME)
            card.write_text(model_card(self, repo_id, _pngs(card.with_name(PLOTS_NAME))), encoding="utf-8")
            upload_kwargs.setdefault("commit_message", "Upload Dustin profile")
            commit = huggingface_hub.upload_folder(repo_id=repo_id, folder_path=folder, token=token, **upload_kwargs)
        return commit.commit_url

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **hub_kwargs: Any) -> "DustinProfile":
        """Read a profile from a folder, a JSON file, or a Hub repository (`hub_kwargs` go to `hf_hub_download`).

        Raises:
            FileNotFoundError: if a folder or JSON file is named that holds none, or is not there; or what is no Hub id.
            ValueError: if the file is no profile of a known schema.
        """
        given = Path(name_or_path)
        path = given / PROFILE_NAME if given.is_dir() else given
        if not path.is_file():
            if given.is_dir() or given.suffix == ".json":  # the Hub would only be asked in vain
                raise FileNotFoundError(f"`profile` {path} does not exist: name a finished study, a file or a Hub id")
            from huggingface_hub import hf_hub_download
            from huggingface_hub.errors import HFValidationError

            try:
                path = Path(hf_hub_download(str(name_or_path), PROFILE_NAME, **hub_kwargs))
            except HFValidationError as error:
                raise FileNotFoundError(f"`profile` {name_or_path} does not exist, and is no Hub id") from error
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"`profile` {path} is not a Dustin profile: {error}") from error


@cache
def _all_shipped() -> tuple[DustinProfile, ...]:
    return tuple(DustinProfile.from_pretrained(path) for path in sorted(SHIPPED.glob("*.json")))


def _pngs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.png"))
