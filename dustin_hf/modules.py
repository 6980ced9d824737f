"""Modules and parameters of a model in one quick walk: every call looks at all of them several times."""

import torch.nn.modules.module as _everywhere
from torch import nn


def modules_of(*models: nn.Module) -> list[nn.Module]:
    """All modules, each once, as `Module.modules()` lists them but without names, which take ten times as long."""
    found: dict[int, nn.Module] = {}
    waiting = list(models)
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting.extend(child for child in module._modules.values() if child is not None)
    return list(found.values())


def parameters_of(*models: nn.Module) -> list[nn.Parameter]:
    """All parameters; one that modules share comes more than once."""
    return [p for module in modules_of(*models) for p in module._parameters.values() if p is not None]


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
