"""The paper's baselines as selection policies, so that every method runs through one engine and the same kernels."""

from dustin_hf.eval.baselines.oracle import OraclePolicy
from dustin_hf.eval.baselines.quest import QuestPolicy
from dustin_hf.eval.baselines.registry import BASELINES, naive_profile, register_baselines, registered_baselines
from dustin_hf.eval.baselines.snapkv import SnapKVPolicy
from dustin_hf.eval.baselines.specattn import SpecAttnPolicy
from dustin_hf.eval.baselines.streaming import StreamingPolicy

__all__ = [
    "BASELINES",
    "OraclePolicy",
    "QuestPolicy",
    "SnapKVPolicy",
    "SpecAttnPolicy",
    "StreamingPolicy",
    "naive_profile",
    "register_baselines",
    "registered_baselines",
]
