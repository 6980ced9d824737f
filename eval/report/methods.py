"""Methods of saved runs: names as the paper writes them, the order of rows, and which runs stand in one section."""

import json
import math
from collections.abc import Sequence
from typing import Any

from dustin_hf.eval.report.captions import heads, model_name
from dustin_hf.eval.report.layout import Marks, best_and_second
from dustin_hf.eval.report.sources import Source

# In the order of the paper's tables; methods registered by users come before the oracle.
METHODS = {
    "full": "Vanilla / lossless SD",
    "streaming": "StreamingLLM",
    "snapkv": "SnapKV",
    "quest": "Quest*",
    "specattn": "SpecAttn-style",
    "target": "Dustin-T",
    "draft": "Dustin-D",
    "hybrid": "Dustin",
    "oracle": "Oracle (upper bound)",
}
SHARED = ("target", "draft", "dtype", "settings", "generation", "profile", "questions")
MARKED = (
    "Bold: the best of the compressed methods of one budget; underlined: the second best; equal ones alike. The "
    "oracle, which sees the attention to come, does not compete."
)
QUEST = " * Quest reads all of layers 0 and 1, which is beyond the budget."


def method_name(mode: str) -> str:
    """As the paper writes it; a user's own as it is."""
    return METHODS.get(mode, mode)


def comparable(sources: Sequence[Source], also: Sequence[str] = ()) -> list[list[Source]]:
    """Sets of runs that only their methods tell apart: the same models, settings and samples.

    Args:
        sources: runs of one benchmark.
        also: fields of their configurations that must be equal, besides `SHARED`.

    Returns:
        Sets in the order of `sources`; within one the lossless run first, then by budget from the largest, then in the
        paper's order.

    Raises:
        ValueError: if two runs of a set are of one method.
    """
    together: dict[str, dict[tuple[str, int | None], Source]] = {}
    for source in sources:
        config = source.content["config"]
        key = json.dumps([config[name] for name in (*SHARED, *also)], sort_keys=True)
        method = config["method"]["mode"], config["method"]["budget"]
        other = together.setdefault(key, {}).setdefault(method, source)
        if other is not source:
            raise ValueError(f"{source.path} and {other.path} are runs of one method on the same samples: give one")
    return [[found[method] for method in sorted(found, key=_rank)] for found in together.values()]


def _rank(method: tuple[str, int | None]) -> tuple[float, float]:
    mode, budget = method
    order = list(METHODS)
    place = order.index(mode) if mode in METHODS else order.index("oracle") - 0.5
    return (-math.inf if budget is None else -budget, place)


def conditions_of(sources: Sequence[Source]) -> list[dict[str, Any] | None]:
    """Where runs were made, and where they went on."""
    configs = [source.content["config"] for source in sources]
    return [each for config in configs for each in (config.get("conditions"), *config.get("continued", []))]


def pair_of(config: dict[str, Any]) -> tuple[str, str]:
    """Names of target and draft."""
    return model_name(config["target"]["id"]), model_name(config["draft"]["id"])


def set_up(config: dict[str, Any], also: str = "") -> str:
    """Models, settings, those of a benchmark too, and heads in words."""
    settings, (target, draft) = config["settings"], pair_of(config)
    return (
        f"Target {target}, draft {draft}, {config['dtype'].removeprefix('torch.')}; greedy, acceptance real; gamma "
        f"{settings['gamma']}, batch {settings['batch_size']}, {also}draft cache {settings['draft_cache']}; "
        f"{heads(config['profile'])}."
    )


def marks(methods: Sequence[tuple[str, int | None]], values: Sequence[Sequence[float | None]]) -> Marks:
    """The best two of each budget.

    Args:
        methods: mode and budget of each row.
        values: of each row, in columns that begin after those of method and budget.
    """
    competing = [None if mode == "oracle" else budget for mode, budget in methods]
    return best_and_second(values, competing, first=2)


def footnote(modes: Sequence[str]) -> str:
    """What a caption says of single methods."""
    return QUEST if "quest" in modes else ""
