"""Every difference between the supported transformers releases, in one place."""

from transformers.generation.utils import GenerateDecoderOnlyOutput

# 5.24 renamed the cache argument of model forwards and the cache field of outputs.
CACHE_ARG = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
# Names under which `generate` takes a cache: until 5.40 the old one as well.
CACHE_ARGS = ("cache", "past_key_values")
