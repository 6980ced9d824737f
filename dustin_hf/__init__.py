"""Dustin: sparse verification for speculative decoding of long contexts, behind the `generate` you already call."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dustin_hf.cache import DustinCache
    from dustin_hf.config import DustinConfig
    from dustin_hf.enabling import DustinHandle, disable, enable
    from dustin_hf.generation import DustinGenerateOutput
    from dustin_hf.model_patches.families import UnsupportedModelError
    from dustin_hf.profile import DustinProfile
    from dustin_hf.selection import (
        PolicyContext,
        Selection,
        SelectionPolicy,
        Signals,
        register_policy,
        unregister_policy,
    )
    from dustin_hf.stats import GenerationStats
    from dustin_hf.streaming import BatchStreamer, BatchTextStreamer

__version__ = "0.1.0"

# Imported on first use: importing dustin_hf patches nothing and stays fast.
_HOME = {
    "BatchStreamer": "streaming",
    "BatchTextStreamer": "streaming",
    "DustinCache": "cache",
    "DustinConfig": "config",
    "DustinGenerateOutput": "generation",
    "DustinHandle": "enabling",
    "DustinProfile": "profile",
    "GenerationStats": "stats",
    "PolicyContext": "selection",
    "Selection": "selection",
    "SelectionPolicy": "selection",
    "Signals": "selection",
    "UnsupportedModelError": "model_patches.families",
    "disable": "enabling",
    "enable": "enabling",
    "register_policy": "selection",
    "unregister_policy": "selection",
}

__all__ = [
    "BatchStreamer",
    "BatchTextStreamer",
    "DustinCache",
    "DustinConfig",
    "DustinGenerateOutput",
    "DustinHandle",
    "DustinProfile",
    "GenerationStats",
    "PolicyContext",
    "Selection",
    "SelectionPolicy",
    "Signals",
    "UnsupportedModelError",
    "disable",
    "enable",
    "register_policy",
    "unregister_policy",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
