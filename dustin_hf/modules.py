"""Modules and parameters of a model in one quick walk: every call looks at all of them several times."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.modules.module as _everywhere
from torch import nn


class _ThisThread(threading.local):
    walks: dict[nn.Module, list[nn.Module]] | None = None  # of models met within `walking_once`


_this_thread = _ThisThread()


@contextmanager
def walking_once() -> Iterator[None]:
    """Within this, in this thread, `modules_of` walks through each model once: for a call, which takes none apart."""
    before, _this_thread.walks = _this_thread.walks, {}
    try:
        yield
    finally:
        _this_thread.walks = before


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules, each once, as `Module.modules()` lists them but without names, which take ten times as long."""
    walks = _this_thread.walks
    if walks is None:
        return _walk(model)
    if model not in walks:
        walks[model] = _walk(model)
    return walks[model]


def _walk(model: nn.Module) -> list[nn.Module]:
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


def parameters_of(*models: nn.Module) -> list[nn.Parameter]:
    """All parameters; one that modules or models share comes more than once."""
    modules = (module for model in models for module in modules_of(model))
    return [p for module in modules for p in module._parameters.values() if p is not None]


def has_patched_classes(model: nn.Module) -> bool:
    """Whether the class of a module has a forward that was written elsewhere and put into it."""
    owners = {next(c for c in type(m).__mro__ if "forward" in c.__dict__) for m in modules_of(model)}
    return any(getattr(owner.__dict__["forward"], "__module__", None) != owner.__module__ for owner in owners)


def has_hooks(model: nn.Module) -> bool:
    """Whether anything runs around a module's forward, accelerate's hooks included.

    What transformers leaves behind once a forward was asked for hidden states or attentions does nothing elsewhere.
    Hooks of all modules there are count too.
    """
    return bool(_everywhere._global_forward_hooks or _everywhere._global_forward_pre_hooks) or any(
        "_hf_hook" in m.__dict__
        or any(
            getattr(hook, "__module__", None) != "transformers.utils.output_capturing"
            for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())
        )
        for m in modules_of(model)
    )
