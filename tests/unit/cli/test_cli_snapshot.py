"""One snapshot model and what its renderers make of it."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from rollstream.cli.live import PlainLines, bar, render, sparkline
from rollstream.cli.metrics_file import MetricsFile
from rollstream.cli.snapshot import Facts, Member, Snapshot, Wait, one_line, take_snapshot
from rollstream.core.telemetry.names import REWARD_MEAN as REWARD

FACTS = Facts(
    phase="running",
    committed=4,
    newest_version=3,
    members=(
        Member("inference", "replica-0", "ready", version=3, inflight=12),
        Member("inference", "replica-1", "loading", version=2),
    ),
    waits=(
        Wait("orchestrator", "o", "max_off_policy_steps", 1.0),
        Wait("trainer", "t", "batch", 4.0, left=56.0, detail="batch 5"),
        Wait("env-worker", "w", "episodes", 0.5),
    ),
)


def snapshot(tmp_path: Path, facts: Facts = FACTS) -> Snapshot:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    rows = [
        {"step": 0, "eval/reverse-text/reward/mean": 0.5},
        {"step": 1, REWARD: 0.4, "off_policy/mean": 0.0, "off_policy/max": 0},
        {"step": 2, REWARD: 0.6, "off_policy/mean": 0.5, "off_policy/max": 1},
        {"step": 2, "optim/grad_norm": 0.9, "perf/throughput": 1234.5, "time/step": 0.81, "time/wait_for_batch": 0.2},
        {"step": 3, REWARD: 0.7, "pacing/max_lead/seconds": 0.4, "pacing/max_off_policy_steps/seconds": 0.1},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics.refresh()
    return take_snapshot("demo", 30, metrics, facts, restarts=1, elapsed=61.0)


def test_bus_and_metrics_are_put_together(tmp_path: Path) -> None:
    seen = snapshot(tmp_path)
    assert (seen.step, seen.committed, seen.newest_version) == (3, 4, 3)
    assert (seen.reward, seen.lag_mean, seen.lag_max, seen.tokens_per_second) == (0.7, 0.5, 1.0, 1234.5)
    assert seen.limit == "max_off_policy_steps"
    assert json.loads(json.dumps(seen.as_dict()))["evals"] == {"eval/reverse-text/reward/mean": [[0, 0.5]]}


def test_a_run_that_has_not_begun_has_no_figures(tmp_path: Path) -> None:
    seen = take_snapshot("demo", 30, MetricsFile(tmp_path / "none"), Facts())
    assert (seen.step, seen.reward, seen.limit) == (0, None, None)
    assert one_line(seen) == "step 0/30 · reward – · lag – (max –) · v0 on no replica · – tok/s · – s/step"


def test_the_limit_is_the_one_waited_for_else_the_one_that_held_longest(tmp_path: Path) -> None:
    assert snapshot(tmp_path).limit == "max_off_policy_steps"
    assert snapshot(tmp_path, Facts()).limit == "max_lead"


def test_one_line_tells_the_longest_wait_and_the_limit(tmp_path: Path) -> None:
    line = one_line(snapshot(tmp_path))
    assert "step 3/30 · reward 0.700 · lag 0.5 (max 1) · v3 on v3 · 1,234 tok/s" in line
    assert "limit max_off_policy_steps · 1 restarts · waits: trainer: batch, batch 5 (4 s)" in line


def test_the_screen_shows_who_waits_for_what(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=120)
    console.print(render(snapshot(tmp_path), ["router ended with SIGKILL"]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("3/30", "0.700", "trainer: batch, batch 5 (4 s)", "max_off_policy_steps", "replica-1 loading v2",
                 "router ended with SIGKILL", "1,234 tok/s"):  # fmt: skip
        assert part in text


def test_plain_lines_are_one_a_step_or_interval(tmp_path: Path) -> None:
    stream = io.StringIO()
    screen = PlainLines(stream)
    for _ in range(3):
        screen.show(snapshot(tmp_path))
    assert stream.getvalue().count("step 3/30") == 1
    screen.show(snapshot(tmp_path, Facts(newest_version=4)))
    assert stream.getvalue().count("step 4/30") == 1


def test_bars() -> None:
    assert bar(5, 10, 4) == "██░░"
    assert bar(0, 0, 2) == "░░"
    assert sparkline((0.0, 1.0, 0.5)) == "▁█▅"
    assert sparkline((0.5, 0.5)) == "▁▁" and sparkline(()) == ""
