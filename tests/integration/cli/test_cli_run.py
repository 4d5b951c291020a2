"""A whole run through the launcher with the scripted engine in vLLM's place: all other parts are real."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rollstream.cli.launcher.leash import MARKER
from support.launches import Launch, launched, marked, run_to_end, scripted_engine
from support.tiny_model import make_tiny_model

SERVER_NAMES = {"nats": ("nats-server",), "redis": ("valkey-server", "redis-server")}

STEPS = 30
"""Enough to look at the run while it goes on."""

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), layers=1, hidden=64)


def arguments(model: Path, steps: int, *more: str, **behaviour: object) -> list[str]:
    return [
        "rl", "--run.name", "run", "--model.name", str(model), "--max-steps", str(steps), "--seq-len", "128",
        "--orchestrator.train", json.dumps([{"id": "reverse-text"}]), "--orchestrator.sampling.max-tokens", "8",
        "--orchestrator.groups-per-batch", "2", "--orchestrator.group-size", "4", "--trainer.threads", "1",
        *scripted_engine(**behaviour), *more,
    ]  # fmt: skip


def steps_of(run: Path) -> list[int]:
    """Steps that the trainer has reported, in the order of the file."""
    path = run / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if "optim/grad_norm" in row]


def component(launch: Launch, name: str) -> psutil.Process:
    """First process of a component of this launch."""
    found = [process for process in launch.alive() if process.environ().get(MARKER, "").endswith(f"/{name}")]
    assert found, f"{name} does not run"
    return min(found, key=lambda process: process.create_time())


def test_a_run_completes_and_can_be_looked_at(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    with launched(*arguments(model, STEPS, token_delay=0.1), cwd=tmp_path) as launch:
        launch.until(lambda: len(steps_of(run)) >= 1, 180)
        code, status = run_to_end("status", str(run), "--json", cwd=tmp_path)
        assert launch.wait(180) == 0, launch.text()
        assert launch.alive() == []
    assert steps_of(run) == list(range(1, STEPS + 1))
    assert f"step {STEPS}/{STEPS}" in launch.text()

    seen = json.loads(status)
    assert code == 0 and seen["max_steps"] == STEPS and seen["phase"] in ("running", "draining", "finalising", "done")
    assert {member["role"] for member in seen["members"]} >= {"inference", "router"}

    assert (run / "logs" / "latest" / "trainer.log").exists()
    assert json.loads((run / "configs" / "latest" / "resolved" / "trainer.json").read_text())["max_steps"] == STEPS
    code, after = run_to_end("status", str(run), cwd=tmp_path)
    assert code == 0 and f"{STEPS}/{STEPS}" in after and "not running" in after


def test_ctrl_c_stops_in_order_and_resume_goes_on(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    with launched(*arguments(model, STEPS, token_delay=0.1), cwd=tmp_path) as launch:
        launch.until(lambda: len(steps_of(run)) >= 1, 180)
        launch.interrupt()
        assert launch.wait(60) == 130, launch.text()
        assert launch.alive() == []
        assert "--resume" in launch.text()
    code, output = run_to_end(*arguments(model, STEPS, "--resume"), cwd=tmp_path, timeout=240)
    assert code == 0, output
    assert sorted(set(steps_of(run))) == list(range(1, STEPS + 1))
    assert (run / "logs" / "latest").readlink().name == "attempt_2"


def test_ctrl_c_twice_stops_at_once(model: Path, tmp_path: Path) -> None:
    with launched(*arguments(model, 50, token_delay=0.05), cwd=tmp_path) as launch:
        launch.until(lambda: "attempt 1" in launch.text() and len(launch.alive()) > 6, 120)
        launch.interrupt()
        time.sleep(0.1)
        began = time.monotonic()
        launch.interrupt()
        launch.wait(30)
        assert time.monotonic() - began < 10
        assert launch.alive() == []


def test_a_killed_launcher_leaves_nothing_and_resume_goes_on(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    with launched(*arguments(model, STEPS, token_delay=0.1), cwd=tmp_path) as launch:
        launch.until(lambda: len(steps_of(run)) >= 1, 180)
        launch.process.kill()
        launch.process.wait(10)
        end = time.monotonic() + 15
        while marked(launch.mark) and time.monotonic() < end:
            time.sleep(0.1)
        assert [process.cmdline() for process in marked(launch.mark)] == []
    code, output = run_to_end(*arguments(model, STEPS, "--resume"), cwd=tmp_path, timeout=240)
    assert code == 0, output
    assert sorted(set(steps_of(run))) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("victim", ["router", "inference-0", "env-worker-0", "orchestrator", "trainer"])
def test_any_component_may_die(victim: str, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    with launched(*arguments(model, STEPS, token_delay=0.1), cwd=tmp_path) as launch:
        launch.until(lambda: len(steps_of(run)) >= 1, 180)
        os.kill(component(launch, victim).pid, signal.SIGKILL)
        assert launch.wait(240) == 0, launch.text()
        assert launch.alive() == []
        assert f"{victim} ended with SIGKILL" in launch.text()
    assert sorted(set(steps_of(run))) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("server", ["nats", "redis"])
def test_an_embedded_server_may_die(server: str, model: Path, tmp_path: Path) -> None:
    run = tmp_path / "outputs" / "run"
    with launched(*arguments(model, STEPS, token_delay=0.1), cwd=tmp_path) as launch:
        launch.until(lambda: len(steps_of(run)) >= 2, 180)
        victims = [process for process in launch.alive() if process.name() in SERVER_NAMES[server]]
        assert len(victims) == 1
        victims[0].kill()
        assert launch.wait(240) == 0, launch.text()
        assert launch.alive() == []
        assert "died; restarting it on its port and data" in launch.text()
    assert sorted(set(steps_of(run))) == list(range(1, STEPS + 1))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 96 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(directory)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs privileges: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def test_a_disk_that_fills_up_fails_the_run_and_resume_goes_on(model: Path, tmp_path: Path, disk: Path) -> None:
    run = disk / "run"
    where = ["--output-dir", str(disk)]
    with launched(*arguments(model, 40, *where, token_delay=0.02), cwd=tmp_path) as launch:
        launch.until(lambda: len(steps_of(run)) >= 2, 180)
        filler = disk / "filler"
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(64 * 1024))
        code = launch.wait(120)
        assert launch.alive() == []
    assert code != 0 and "free some space" in launch.text(), launch.text()
    assert "Traceback" not in launch.text()
    filler.unlink()
    done = max(steps_of(run))
    assert done < 40
    code, output = run_to_end(*arguments(model, 40, *where, "--resume"), cwd=tmp_path, timeout=240)
    assert code == 0, output
    assert sorted(set(steps_of(run))) == list(range(1, 41))
