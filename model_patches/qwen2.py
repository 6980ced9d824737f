"""Qwen2, Qwen2.5, Qwen2.5-Coder."""

from dustin_hf.model_patches.families import ModelFamily

QWEN2 = ModelFamily("qwen2")
