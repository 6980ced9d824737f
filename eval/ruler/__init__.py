"""RULER's kind of tasks: facts hidden in long texts, samples of exact lengths, and scores."""

from dustin_hf.eval.ruler.metrics import score, score_task
from dustin_hf.eval.ruler.samples import Sample, ruler_samples
from dustin_hf.eval.ruler.tasks import TASKS, Task, task_of

__all__ = ["TASKS", "Sample", "Task", "ruler_samples", "score", "score_task", "task_of"]
