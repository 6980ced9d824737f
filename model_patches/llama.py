"""Llama 2, Llama 3.x, SmolLM2 and other models of the Llama architecture."""

from dustin_hf.model_patches.families import ModelFamily

LLAMA = ModelFamily("llama")
