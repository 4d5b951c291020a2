"""metrics.jsonl: whole lines from several processes, through crashes and full disks; a monitor never stops a run."""

from __future__ import annotations

import io
import json
import multiprocessing
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from rollstream.core.config import LogConfig, MonitorsConfig
from rollstream.core.telemetry import FileMonitor, MonitorGroup, configure_logging, names


@pytest.fixture
def log() -> io.StringIO:
    stream = io.StringIO()
    configure_logging(LogConfig(), "trainer", stream=stream)
    return stream


def group(path: Path, config: MonitorsConfig | None = None) -> MonitorGroup:
    return MonitorGroup.from_config(
        config or MonitorsConfig(), metrics_path=path, run_name="run", run_id="abc", component="trainer"
    )


def rows(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_holds_the_step_and_the_values(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    monitors = group(path)
    monitors.log(3, {names.LEARNING_RATE: 1e-4, names.GRAD_NORM: np.float32(0.5), names.TOKENS: 7})
    monitors.close()
    [row] = rows(path)
    assert {**row, "time": 0} == {"step": 3, "time": 0, "optim/lr": 1e-4, "optim/grad_norm": 0.5, names.TOKENS: 7}


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    monitors = group(tmp_path / "metrics.jsonl")
    monitors.log(1, {"a": float("nan"), "b": float("inf"), "c": -np.inf, "d": 1.0})
    assert {name: rows(tmp_path / "metrics.jsonl")[0][name] for name in "abcd"} == {
        "a": None, "b": None, "c": None, "d": 1.0,
    }  # fmt: skip


def test_nothing_is_written_when_it_is_off(tmp_path: Path) -> None:
    monitors = group(tmp_path / "metrics.jsonl", MonitorsConfig.model_validate({"file": {"enabled": False}}))
    monitors.log(1, {"a": 1.0})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_line_that_a_crash_cut_off_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    monitor = FileMonitor(path)
    monitor.log(1, {"a": 1.0})
    with path.open("a") as file:
        file.write('{"step": 2, "a')
    monitor.log(3, {"a": 3.0})
    monitor.log(4, {"a": 4.0})
    lines = path.read_text().splitlines()
    assert lines[1] == '{"step": 2, "a'
    assert [json.loads(line)["step"] for line in (lines[0], *lines[2:])] == [1, 3, 4]


def write_many(path: Path, who: int, lines: int) -> None:
    monitor = FileMonitor(path)
    for step in range(lines):
        monitor.log(step, {f"writer/{who}": float(step), "padding/" + "x" * 2000: 0.0})


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_many, args=(path, who, 300)) for who in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    written = rows(path)
    for who in range(3):
        assert [row["step"] for row in written if f"writer/{who}" in row] == list(range(300))
    assert len(written) == 900


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs privileges: {mounted.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_is_one_warning_and_writing_goes_on_once_there_is_room(small_disk: Path, log: io.StringIO) -> None:
    path = small_disk / "metrics.jsonl"
    monitors = group(path)
    monitors.log(1, {"a": 1.0})
    ballast = small_disk / "ballast"
    with pytest.raises(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    for step in range(2, 200):
        monitors.log(step, {"a": float(step), "padding/" + "x" * 100: 0.0})
    assert log.getvalue().count("file monitor failed") == 1 and "free some space" in log.getvalue()
    ballast.unlink()
    monitors.log(1000, {"a": 0.0})
    last = path.read_text().splitlines()[-1]
    assert json.loads(last)["step"] == 1000, "a whole line, though the one before it was cut off"


def test_a_monitor_that_cannot_start_or_log_is_a_warning(log: io.StringIO) -> None:
    seen: list[int] = []

    class Broken:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise RuntimeError("key 0123456789abcdef is wrong")

        def close(self) -> None:
            raise RuntimeError

    class Sound(Broken):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            seen.append(step)

    def refuses() -> Broken:
        raise RuntimeError("key 0123456789abcdef is wrong")

    monitors = MonitorGroup({"refuses": refuses, "broken": Broken, "sound": Sound})
    for step in (1, 2, 3):
        monitors.log(step, {})
    monitors.close()
    monitors.close()
    assert seen == [1, 2, 3]
    assert log.getvalue().count("refuses monitor failed to start") == 1
    assert log.getvalue().count("broken monitor failed to log") == 1
    assert "0123456789abcdef" not in log.getvalue()


def test_the_fields_names_are_the_issues() -> None:
    assert {
        names.REWARD_MEAN, names.MISMATCH_KL, names.ENTROPY, names.GRAD_NORM, names.LEARNING_RATE,
        names.OFF_POLICY_MEAN, names.OFF_POLICY_MAX, names.THROUGHPUT, names.STEP_TIME, names.WAIT_TIME,
        names.eval_metric("reverse-text", "reward/mean"),
    } == {
        "train/agg/effective/agent/reward/mean", "mismatch_kl/all/mean", "entropy/all/mean", "optim/grad_norm",
        "optim/lr", "off_policy/mean", "off_policy/max", "perf/throughput", "time/step", "time/wait_for_batch",
        "eval/reverse-text/reward/mean",
    }  # fmt: skip


def test_no_name_is_declared_twice() -> None:
    declared = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    assert len(declared) > 20 and len(set(declared)) == len(declared)


def test_a_summary_is_of_the_values() -> None:
    assert names.summary("x", np.array([1.0, 2.0, 6.0])) == {
        "x/mean": 3.0, "x/std": pytest.approx(np.sqrt(14 / 3)), "x/min": 1.0, "x/max": 6.0,
    }  # fmt: skip
