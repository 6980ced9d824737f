"""Qwen3: queries and keys are normalised before the rotary embedding, heads have a size of their own."""

from dustin_hf.model_patches.families import ModelFamily

QWEN3 = ModelFamily("qwen3")
