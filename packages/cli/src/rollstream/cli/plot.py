"""The reward curve of a run as a picture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from rollstream.cli.metrics_file import MetricsFile
from rollstream.core.errors import UsageError
from rollstream.core.telemetry import names

EVAL_REWARD = re.compile(r"^eval/(?P<source>.+)/reward/mean$")


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and up to ``window - 1`` before it."""
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window) for i in range(len(values))]


def plot_reward(metrics: Path, out: Path) -> Path:
    """Draw the train reward (raw and smoothed) and each held-out reward of ``metrics`` into ``out``; returns it.

    Raises :class:`UsageError` when the file holds no reward yet or matplotlib is not installed.
    """
    file = MetricsFile(metrics)
    file.refresh()
    train = file.series(names.REWARD_MEAN)
    if not train:
        raise UsageError(
            f"{metrics} holds no {names.REWARD_MEAN}", hint="give the metrics.jsonl of a run that has made a step"
        )
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("matplotlib is not installed here", hint="pip install 'rollstream-cli[plot]'") from error

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, values = [step for step, _ in train], [value for _, value in train]
    axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=1, label="train, each step")
    window = max(1, min(10, len(values) // 5))
    axes.plot(steps, smooth(values, window), color="tab:blue", linewidth=2, label=f"train, mean of {window} steps")
    for colour, name in zip(("tab:orange", "tab:green", "tab:red"), sorted(eval_rewards(file)), strict=False):
        points = file.series(name)
        label = f"held out: {EVAL_REWARD.match(name)['source']}"  # type: ignore[index]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", linewidth=1.5, label=label)
    axes.set(xlabel="step", ylabel="reward", title=metrics.parent.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(out)
    return out


def eval_rewards(file: MetricsFile) -> set[str]:
    """Names of the held-out rewards in ``file``."""
    return {name for name in file.names() if EVAL_REWARD.match(name)}
