"""The paper's figures 1, 7, 8 and 10, drawn from our results as PNG and SVG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dustin_hf.eval.report.layout import tokens
from dustin_hf.profiling.plots import COLORS, OTHER, STYLES, new_figure, save_figure

# Of the bars' parts; verification and drafts as the policies that follow target and draft.
COLOR_OF = {"draft": COLORS[2], "select": COLORS[4], "verify": COLORS[0], "accept": COLORS[3], "rest": "#999999"}


class Step(NamedTuple):
    """One bar of figure 1.

    Args:
        label: method.
        phases: milliseconds of each.
        step_ms: the whole step, which is a little longer than its phases.
    """

    label: str
    phases: Mapping[str, float]
    step_ms: float


def draw_steps(steps: Sequence[Step], title: str, stem: Path) -> list[Path]:
    """Figure 1: a bar for each method, a step's phases upon each other.

    Args:
        steps: from left to right.
        title: pair and size.
        stem: path of the files, without suffix.
    """
    figure, (axes,) = new_figure(1, max(4.4, 1.8 + 0.9 * len(steps)))
    places, below = range(len(steps)), [0.0] * len(steps)
    rest = [max(0.0, step.step_ms - sum(step.phases.values())) for step in steps]
    for phase, color in COLOR_OF.items():
        heights = rest if phase == "rest" else [step.phases[phase] for step in steps]
        axes.bar(places, heights, bottom=below, color=color, label=phase, width=0.7)
        below = [low + height for low, height in zip(below, heights)]
    for place, step, top in zip(places, steps, below):
        axes.annotate(f"{step.step_ms:.1f}", (place, top), ha="center", va="bottom")
    axes.set_xticks(places, [step.label.replace(", ", ",\n") for step in steps], rotation=30, ha="right")
    axes.set(ylabel="ms a step")
    figure.suptitle(title, fontsize="medium", wrap=True)
    axes.margins(y=0.12)
    axes.set_axisbelow(True)
    figure.legend(fontsize="small", loc="outside lower center", ncols=len(COLOR_OF))
    return save_figure(figure, stem)


def draw_attention(points: Sequence[tuple[str, float, float, float]], title: str, stem: Path) -> list[Path]:
    """Figures 7 and 10: Dustin's self-attention in percent of the full cache's, at each point.

    Args:
        points: batch and context in words, then microseconds over the full cache, over the selected tokens, and of
            estimation.
        title: model.
        stem: path of the files, without suffix.
    """
    figure, (axes,) = new_figure(1, 1.8 + 0.9 * len(points))
    places = range(len(points))
    sparse = [100 * us / full for _, full, us, _ in points]
    select = [100 * us / full for _, full, _, us in points]
    axes.bar([x - 0.2 for x in places], [100] * len(points), 0.38, color="#999999", label="full cache")
    right = [x + 0.2 for x in places]
    axes.bar(right, sparse, 0.38, color=COLOR_OF["verify"], label="sparse attention")
    axes.bar(right, select, 0.38, bottom=sparse, color=COLOR_OF["select"], label="estimation")
    for x, low, high in zip(right, sparse, select):
        axes.annotate(f"{100 / (low + high):.1f}x", (x, low + high), ha="center", va="bottom")
    axes.set_xticks(places, [point[0] for point in points])
    axes.set(ylabel="% of full-cache attention", title=f"Self-attention of verification, {title}", ylim=(0, 130))
    axes.set_axisbelow(True)
    axes.legend(ncols=3, fontsize="small", loc="upper center")
    return save_figure(figure, stem)


def draw_estimators(
    shares: Mapping[tuple[str, str], Sequence[tuple[int, float]]], title: str, stem: Path
) -> list[Path]:
    """Figure 8: latency of each estimator by context, full-cache self-attention being 1.

    Args:
        shares: (estimator, how it is called) -> context and latency, shortest context first.
        title: model.
        stem: path of the files, without suffix.
    """
    figure, (axes,) = new_figure(1, 5.5)
    for (name, label), line in shares.items():
        color, marker = STYLES.get(name, OTHER)
        contexts, latencies = zip(*line)
        axes.plot(contexts, latencies, "-", color=color, marker=marker, label=label)
    axes.axhline(1, color="black", linestyle="--", linewidth=1, label="full-cache attention")
    ticks = sorted({context for line in shares.values() for context, _ in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [tokens(context) for context in ticks])
    axes.minorticks_off()
    axes.set_yscale("log")
    axes.set(xlabel="context", ylabel="latency over full-cache attention", title=f"Estimation of importance, {title}")
    axes.legend(fontsize="small")
    return save_figure(figure, stem)
