"""enable and disable: put the mixin in front of a model's class, and take it away again."""

import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Optional
from weakref import WeakSet

from transformers import AttentionInterface
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import AttentionMaskInterface

from dustin_hf.generation import CACHE_IMPLEMENTATION, DustinGenerationMixin, is_requested
from dustin_hf.model_patches.attention import ATTENTION_NAME, dustin_attention_forward, dustin_mask
from dustin_hf.model_patches.families import family_of
from dustin_hf.pool import Pool
from dustin_hf.profile import DustinProfile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_lock = threading.RLock()
_enabled: "WeakSet[PreTrainedModel]" = WeakSet()
_global_handles: list["DustinHandle"] = []
_undo_host: list[Any] = []


class DustinHandle:
    """Undoes one `enable`: call `remove()`, or use it as a context manager. Removing twice does nothing more."""

    def __init__(self, model: Optional["PreTrainedModel"]):
        self.model = model

    def remove(self) -> None:
        """Leave the model, or with `enable()` every model, as if this `enable` had not been."""
        with _lock:
            if self.model is not None:
                _pop_profile(self.model, self)
            elif self in _global_handles:
                _global_handles.remove(self)
                if not _global_handles:
                    for model in list(_enabled):
                        _pop_profile(model, None)
            _release_host()

    def __enter__(self) -> "DustinHandle":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()


def enable(
    model: Optional["PreTrainedModel"] = None, *, profile: "DustinProfile | str | os.PathLike[str] | None" = None
) -> DustinHandle:
    """Make `generate(..., assistant_model=draft, cache_implementation="dustin")` work.

    The model keeps its weights, its forward and its class's name; only calls that ask for Dustin change. Enabling a
    model again with another profile is fine: the newest profile counts until its handle is removed.

    Args:
        model (`PreTrainedModel`, *optional*): the target. Default: every supported model, until `disable()`.
        profile (`DustinProfile` or `str`, *optional*): of the target-draft pair, or a folder, file or Hub id of one.
            Default: the one that this package has for the pair, else one that fits any (`DustinProfile.default`).

    Returns:
        A handle: `remove()` it, or use it in a `with` statement.

    Raises:
        UnsupportedModelError: if the model's architecture is not supported.
        FileNotFoundError: if there is no profile of that name.
        ValueError: if `profile` is given without a model, is not a profile, or is one of another target.
    """
    if model is None:
        if profile is not None:
            raise ValueError("`profile` belongs to one pair: pass its model too, enable(model, profile=...)")
        handle = DustinHandle(None)
        with _lock:
            _acquire_host()
            _global_handles.append(handle)
        return handle
    config = getattr(model, "config", None)
    if not isinstance(model, GenerationMixin) or config is None:
        raise ValueError(f"`model` must be a transformers model that can generate, got {type(model).__name__}")
    family_of(config.get_text_config(decoder=True))
    if isinstance(profile, str | os.PathLike):
        profile = DustinProfile.from_pretrained(os.fspath(profile))
    elif profile is not None and not isinstance(profile, DustinProfile):
        raise ValueError(f"`profile` must be a DustinProfile, a path or a Hub id, got {type(profile).__name__}")
    if profile is not None:
        profile.check_pair(config.get_text_config(decoder=True), None)
    handle = DustinHandle(model)
    with _lock:
        _acquire_host()
        _push_profile(model, handle, profile)
    return handle


def disable(model: Optional["PreTrainedModel"] = None) -> None:
    """Undo every `enable` of a model, or without one every `enable` there was."""
    with _lock:
        if model is None:
            _global_handles.clear()
        for each in list(_enabled) if model is None else [model]:
            if isinstance(each, DustinGenerationMixin):
                each._dustin_profiles.clear()
                _pop_profile(each, None)
        _release_host()


def _push_profile(model: Any, handle: DustinHandle | None, profile: DustinProfile | None) -> None:
    if not isinstance(model, DustinGenerationMixin):
        original = type(model)
        namespace: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce_as_original,
            "_dustin_original": original,
            "_dustin_profiles": [],
            "_dustin_pool": Pool(),
        }
        # save_pretrained writes the class's name as the architecture, so the subclass keeps it
        model.__class__ = type(original.__name__, (DustinGenerationMixin, original), namespace)
        _enabled.add(model)
    model._dustin_profiles.append((handle, profile))


def _pop_profile(model: Any, handle: DustinHandle | None) -> None:
    """Forget the entry of one `enable`; the last one gives the model its class back."""
    if not isinstance(model, DustinGenerationMixin):
        return
    profiles = model._dustin_profiles
    profiles[:] = [entry for entry in profiles if entry[0] is not handle]
    if not profiles:
        model._dustin_pool.close()
        model.__class__ = type(model)._dustin_original
        _enabled.discard(model)


def _reduce_as_original(self: Any, protocol: Any) -> Any:
    """Copies and pickles are of the original class: no handle would know them."""
    state = super(type(self), self).__reduce_ex__(2)[2]
    return object.__new__, (type(self)._dustin_original,), state


def _acquire_host() -> None:
    """What must be known to transformers while anything is enabled."""
    if _undo_host:
        return
    AttentionInterface.register(ATTENTION_NAME, dustin_attention_forward)
    AttentionMaskInterface.register(ATTENTION_NAME, dustin_mask)
    for interface in (AttentionInterface, AttentionMaskInterface):
        _undo_host.append(functools.partial(interface._global_mapping.pop, ATTENTION_NAME, None))

    names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    _replace(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", (*names, CACHE_IMPLEMENTATION))
    _replace(GenerationMixin, "generate", _guarded(GenerationMixin.generate))


def _replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of the host, to be undone by `_release_host` unless somebody else has set it since."""
    before = getattr(owner, name)

    def undo() -> None:
        if getattr(owner, name) is value:
            setattr(owner, name, before)

    _undo_host.append(undo)
    setattr(owner, name, value)


def _release_host() -> None:
    """Undo `_acquire_host` once nothing is enabled any more."""
    if not _enabled and not _global_handles:
        while _undo_host:
            _undo_host.pop()()


def _guarded(stock_generate: Any) -> Any:
    """Stock `generate`, except that a model without the mixin never takes "dustin" for an ordinary dynamic cache.

    Under `enable()` it gets the mixin on its first such call; otherwise it is told to be enabled.
    """

    @functools.wraps(stock_generate)
    def generate(self, inputs=None, generation_config=None, *args, **kwargs):
        # a repository's own `generate` comes from there, and enables what it needs
        asks = is_requested(self, generation_config, kwargs) and kwargs.get("custom_generate") is None
        if asks and not isinstance(self, DustinGenerationMixin):
            if not _global_handles:
                raise ValueError(
                    "cache_implementation='dustin' and a DustinCache need the model to be enabled first: "
                    "dustin_hf.enable(model)"
                )
            family_of(self.config.get_text_config(decoder=True))
            with _lock:
                _push_profile(self, None, None)
            return self.generate(inputs, generation_config, *args, **kwargs)
        return stock_generate(self, inputs, generation_config, *args, **kwargs)

    return generate
