"""metrics.jsonl as a growing file, and the picture of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollstream.cli.metrics_file import MetricsFile
from rollstream.cli.plot import plot_reward, smooth
from rollstream.core.errors import UsageError
from rollstream.core.telemetry.names import REWARD_MEAN as REWARD


def test_lines_of_two_writers_merge_and_a_torn_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert not file.refresh()
    path.write_text('{"step": 1, "reward": 0.5}\n{"step": 1, "loss": 2}\nnot json\n{"step": 2, "rew')
    assert file.refresh()
    assert file.steps == {1: {"step": 1, "reward": 0.5, "loss": 2}}
    with path.open("a") as more:
        more.write('ard": 0.75}\n')
    assert file.refresh()
    assert file.series("reward") == [(1, 0.5), (2, 0.75)]
    assert file.latest("reward") == 0.75
    assert not file.refresh()


def test_smoothing_is_a_trailing_mean() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_the_curve_is_drawn(tmp_path: Path) -> None:
    rows = [{"step": n, REWARD: n / 10} for n in range(1, 9)] + [
        {"step": n, "eval/reverse-text/reward/mean": n / 10} for n in (0, 8)
    ]
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = plot_reward(metrics, tmp_path / "reward.png")
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_file_without_rewards_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"metrics\.jsonl holds no"):
        plot_reward(tmp_path / "metrics.jsonl", tmp_path / "reward.png")
