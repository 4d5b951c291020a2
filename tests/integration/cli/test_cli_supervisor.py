"""The supervisor on real child programs: restarts, failure, orderly and forced stop, and no orphan by any death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from rollstream.cli.launcher.leash import MARKER, marked
from rollstream.cli.launcher.process import Program
from rollstream.cli.launcher.supervisor import Outcome, Supervisor

GRANDCHILD = """
import os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("up", flush=True)
time.sleep(600)
"""

STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(600)
"""

LAUNCHER = """
import asyncio, sys
from pathlib import Path
from rollstream.cli.launcher.process import Program
from rollstream.cli.launcher.supervisor import Supervisor

async def main(launch, folder, code):
    async with Supervisor(launch, max_restarts=3, grace=5, report=print) as supervisor:
        supervisor.start([
            Program(f"p{i}", (sys.executable, "-c", code), Path(folder) / f"p{i}.log") for i in range(2)
        ])
        await supervisor.outcome()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def launch() -> str:
    return f"test-{uuid.uuid4().hex}"


def python(name: str, code: str, folder: Path, finite: bool = False) -> Program:
    return Program(name, (sys.executable, "-c", code), folder / f"{name}.log", finite)


def wait_until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "not reached within the deadline"
        time.sleep(0.05)


async def until(ready: Callable[[], bool], seconds: float = 20.0) -> None:
    await asyncio.to_thread(wait_until, ready, seconds)


async def supervise(launch: str, programs: list[Program], max_restarts: int = 3) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    async with Supervisor(launch, max_restarts=max_restarts, grace=5, report=lines.append) as supervisor:
        supervisor.start(programs)
        outcome = await asyncio.wait_for(supervisor.outcome(), 30)
    assert marked(launch) == []
    return outcome, lines


async def test_success_needs_every_finite_program_and_stops_the_rest(launch: str, tmp_path: Path) -> None:
    programs = [
        python("quick", "pass", tmp_path, finite=True),
        python("slow", "import time; time.sleep(0.5)", tmp_path, finite=True),
        python("service", "import time; time.sleep(600)", tmp_path),
    ]
    began = time.monotonic()
    outcome, _ = await supervise(launch, programs)
    assert outcome == Outcome(True)
    assert 0.5 < time.monotonic() - began < 15


async def test_a_crashed_program_is_restarted_and_its_descendants_die_first(launch: str, tmp_path: Path) -> None:
    lines: list[str] = []
    async with Supervisor(launch, max_restarts=3, grace=5, report=lines.append) as supervisor:
        supervisor.start([python("worker", GRANDCHILD, tmp_path)])
        await until(lambda: len(marked(launch)) == 2)
        before = {process.pid for process in marked(launch)}
        first = supervisor.pid("worker")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: len(marked(launch)) == 2 and supervisor.pid("worker") not in (None, first))
        assert not before & {process.pid for process in marked(launch)}
        assert any("SIGKILL" in line for line in lines)
    assert marked(launch) == []


async def test_too_many_restarts_fail_with_the_log_tail(launch: str, tmp_path: Path) -> None:
    code = "import sys; print('disk is on fire', flush=True); sys.exit(7)"
    outcome, lines = await supervise(launch, [python("trainer", code, tmp_path, finite=True)], max_restarts=2)
    assert (outcome.ok, outcome.exit_code) == (False, 1)
    assert "exit code 7 after 2 restarts" in outcome.reason
    assert outcome.tail == "disk is on fire"
    assert sum("restarted" in line for line in lines) == 2


@pytest.mark.parametrize("code", [2, 4])
async def test_refused_input_and_stale_writer_are_not_restarted(launch: str, tmp_path: Path, code: int) -> None:
    program = python("orchestrator", f"import sys; print('because'); sys.exit({code})", tmp_path, finite=True)
    outcome, lines = await supervise(launch, [program])
    assert (outcome.ok, outcome.exit_code, outcome.tail) == (False, code, "because")
    assert lines == []


async def test_a_command_that_does_not_exist_fails(launch: str, tmp_path: Path) -> None:
    outcome, _ = await supervise(launch, [Program("ghost", ("/no/such/program",), tmp_path / "ghost.log")])
    assert not outcome.ok and "/no/such/program" in outcome.reason


async def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(launch: str, tmp_path: Path) -> None:
    lines: list[str] = []
    async with Supervisor(launch, max_restarts=3, grace=1, report=lines.append) as supervisor:
        supervisor.start([python("stubborn", STUBBORN, tmp_path)])
        await until(lambda: "up" in read_lines(tmp_path / "stubborn.log"))
        began = time.monotonic()
    assert 1.0 <= time.monotonic() - began < 10
    assert marked(launch) == []
    assert any("killed" in line for line in lines)


async def test_leaving_by_cancellation_stops_everything(launch: str, tmp_path: Path) -> None:
    task = asyncio.create_task(supervise(launch, [python("service", GRANDCHILD, tmp_path)]))
    await until(lambda: len(marked(launch)) == 2)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert marked(launch) == []


@pytest.mark.parametrize("how", ["kill -9", "kill -9 of the group"])
def test_a_killed_launcher_leaves_nothing(launch: str, tmp_path: Path, how: str) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, launch, str(tmp_path), GRANDCHILD], start_new_session=True
    )
    try:
        wait_until(lambda: len(marked(launch)) == 4)
        if how == "kill -9":
            launcher.kill()
        else:
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait(10)
        wait_until(lambda: marked(launch) == [])
        wait_until(lambda: not reapers(launch))
    finally:
        launcher.kill()


def reapers(launch: str) -> list[psutil.Process]:
    """The launcher's own helper, which carries no marker."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if launch in command and "rollstream.cli.launcher.reaper" in command:
            found.append(process)
    return found


async def test_the_marker_reaches_descendants_and_not_the_launcher(launch: str, tmp_path: Path) -> None:
    async with Supervisor(launch, max_restarts=3, grace=5, report=print) as supervisor:
        supervisor.start([python("service", GRANDCHILD, tmp_path)])
        await until(lambda: len(marked(launch)) == 2)
        assert {process.environ()[MARKER] for process in marked(launch)} == {f"{launch}/service"}
        assert MARKER not in os.environ


def read_lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []
