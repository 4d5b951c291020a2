"""One child process: started in a session of its own, tied to the launcher, stopped with all its descendants."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollstream.cli.launcher.leash import MARKER, kill_marked, signal_group
from rollstream.core.leash import hold_to

TAIL_BYTES = 16_384


@dataclass(frozen=True)
class Program:
    """What to start. ``finite`` programs end the run with their exit code 0; the others are expected to stay."""

    name: str
    argv: tuple[str, ...]
    log: Path
    finite: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


class ChildProcess:
    """One life of a program: :meth:`start`, :meth:`wait`, then :meth:`sweep`.

    Invariants: standard output and error are appended to the program's log; the child dies with the launcher, even by
    SIGKILL; after :meth:`sweep` no descendant is alive, whatever session it had opened.
    """

    def __init__(self, program: Program, launch: str) -> None:
        self.program = program
        self.marker = f"{launch}/{program.name}"
        self.started = 0.0
        self._log_start = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Pid of the first process, also its group's id."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it. Raises ``OSError`` when the command cannot be run or the log cannot be written."""
        self.program.log.parent.mkdir(parents=True, exist_ok=True)
        # SPT_NOENV keeps libraries that set process titles from overwriting the environment that the marker is in.
        env = {**os.environ, **self.program.env, MARKER: self.marker, "SPT_NOENV": "1"}
        with self.program.log.open("ab") as log:
            self._log_start = log.tell()
            log.write(f"$ {shlex.join(self.program.argv)}\n".encode())
            log.flush()
            self._process = await asyncio.create_subprocess_exec(
                *self.program.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                preexec_fn=functools.partial(hold_to, os.getpid()),
            )
        self.started = time.monotonic()

    async def wait(self) -> int:
        """Exit status of the first process; negative for a signal."""
        assert self._process is not None, "start comes first"
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the group's first process to stop; it decides about its own children."""
        if self._process and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    async def sweep(self) -> None:
        """Kill whatever is left of it."""
        if self._process is None:
            return
        signal_group(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        await asyncio.to_thread(kill_marked, self.marker)

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that this life wrote."""
        return read_tail(self.program.log, self._log_start, lines)


def read_tail(path: Path, start: int, lines: int) -> str:
    """Last ``lines`` lines of the text that ``path`` holds from byte ``start`` on, without the command line."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - TAIL_BYTES))
            text = log.read().decode(errors="replace")
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join([line for line in text.splitlines() if not line.startswith("$ ")][-lines:])
