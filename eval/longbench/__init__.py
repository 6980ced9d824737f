"""LongBench: its tasks and samples."""

from dustin_hf.eval.longbench.data import Sample, load_samples
from dustin_hf.eval.longbench.tasks import CHINESE, ENGLISH, GROUPS, TASKS, Task, task_of

__all__ = ["CHINESE", "ENGLISH", "GROUPS", "TASKS", "Sample", "Task", "load_samples", "task_of"]
