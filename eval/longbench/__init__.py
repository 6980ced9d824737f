"""LongBench: its tasks, samples, prompts and scores, as in the official code."""

from dustin_hf.eval.longbench.data import Sample, load_samples
from dustin_hf.eval.longbench.decoding import decode_answer, end_ids, generate_arguments
from dustin_hf.eval.longbench.metrics import Averages, averages, score_sample, score_task
from dustin_hf.eval.longbench.prompts import encode_prompt, fill_template
from dustin_hf.eval.longbench.tasks import CHINESE, ENGLISH, GROUPS, TASKS, Task, task_of

__all__ = [
    "CHINESE",
    "ENGLISH",
    "GROUPS",
    "TASKS",
    "Averages",
    "Sample",
    "Task",
    "averages",
    "decode_answer",
    "encode_prompt",
    "end_ids",
    "fill_template",
    "generate_arguments",
    "load_samples",
    "score_sample",
    "score_task",
    "task_of",
]
