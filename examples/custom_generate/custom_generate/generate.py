"""Dustin as a custom generation method: a model repository that ships this folder needs no `enable` in user code."""

import dustin_hf
from dustin_hf.generation import DustinGenerationMixin


def generate(model, **kwargs):
    """Called by `model.generate(custom_generate=<repository>, trust_remote_code=True, assistant_model=...)`."""
    if kwargs.get("cache_implementation") is None:
        kwargs["cache_implementation"] = "dustin"
    if isinstance(model, DustinGenerationMixin):  # enabled by the user, with a profile perhaps
        return model.generate(**kwargs)
    with dustin_hf.enable(model):
        return model.generate(**kwargs)
