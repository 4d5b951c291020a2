"""Launching ``rollstream`` as a user would, and proving that nothing of it stays alive."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MARK = "ROLLSTREAM_TEST_LAUNCH"
SCRIPTED_ENGINE = Path(__file__).with_name("scripted_engine.py")


@dataclass
class Launch:
    """A running ``rollstream`` command. Its output goes to ``output``; every descendant carries ``mark``."""

    process: subprocess.Popen[bytes]
    output: Path
    mark: str
    _seen: list[int] = field(default_factory=list)

    def text(self) -> str:
        """What it has printed so far."""
        return self.output.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Exit code; fails the test with the output when it takes too long."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text()[-4000:]}") from None

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def until(self, ready: Callable[[], bool], timeout: float) -> None:
        """Wait for a condition; fails when the command ends first."""
        end = time.monotonic() + timeout
        while not ready():
            assert self.process.poll() is None, f"ended early with {self.process.returncode}:\n{self.text()[-4000:]}"
            assert time.monotonic() < end, f"not reached within {timeout} s:\n{self.text()[-4000:]}"
            time.sleep(0.1)

    def alive(self) -> list[psutil.Process]:
        """Living processes of this launch, the command itself included."""
        return marked(self.mark)


def marked(mark: str) -> list[psutil.Process]:
    """Living processes that carry ``mark`` in their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.contextmanager
def launched(*arguments: str, cwd: Path, env: dict[str, str] | None = None) -> Iterator[Launch]:
    """``rollstream *arguments`` in ``cwd``. On leaving, whatever is left of it is killed."""
    mark = uuid.uuid4().hex
    output = cwd / f"output-{mark}.txt"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {}), MARK: mark}
    with output.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", "rollstream.cli.main", *arguments],
            cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True,
        )  # fmt: skip
    try:
        yield Launch(process, output, mark)
    finally:
        for left in marked(mark):
            with contextlib.suppress(psutil.Error):
                left.kill()
        process.wait(10)


def run_to_end(*arguments: str, cwd: Path, timeout: float = 120, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and output of a command that ends by itself; asserts that it leaves nothing alive."""
    with launched(*arguments, cwd=cwd, env=env) as launch:
        code = launch.wait(timeout)
        left = launch.alive()
        assert not left, f"left alive: {[process.cmdline() for process in left]}"
        return code, launch.text()


def scripted_engine(**behaviour: object) -> list[str]:
    """Arguments that put the scripted engine in vLLM's place."""
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in behaviour.items()]
    return ["--inference.engine-command", json.dumps([sys.executable, str(SCRIPTED_ENGINE), *flags])]
