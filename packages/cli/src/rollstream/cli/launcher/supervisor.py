"""Keeps the programs of a run alive until they have done their work, fail, or are told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from rollstream.cli.launcher.leash import kill_marked
from rollstream.cli.launcher.process import ChildProcess, Program
from rollstream.cli.launcher.restarts import Ended, GiveUp, Restart, RestartPolicy, describe

Report = Callable[[str], None]
"""Receives one line about what the supervisor sees and does."""


@dataclass(frozen=True)
class Outcome:
    """How the supervised programs ended. ``program`` and ``tail`` name the one that failed and its last log lines."""

    ok: bool
    reason: str = ""
    exit_code: int = 0
    program: Program | None = None
    tail: str = ""


class Supervisor:
    """Lifecycle: ``async with``; :meth:`start` programs; await :meth:`outcome`; leaving the block stops everything.

    Invariants: at most one life of a program exists at a time, its descendants included; leaving the block, also by
    an exception or cancellation, returns with nothing alive that was started here; when this process is killed, the
    kernel and the reaper do the same.
    """

    def __init__(self, launch: str, *, max_restarts: int, grace: float, report: Report) -> None:
        self._launch = launch
        self._max_restarts = max_restarts
        self._grace = grace
        self._report = report
        self._outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._children: dict[str, ChildProcess] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._running: set[str] = set()
        self._finite: set[str] = set()
        self._reaper: subprocess.Popen[bytes] | None = None
        self.restarts = 0

    async def __aenter__(self) -> Supervisor:
        self._reaper = _start_reaper(self._launch)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Shielded: a cancelled launcher still ends what it started.
        await asyncio.shield(asyncio.ensure_future(self._end()))

    def start(self, programs: Sequence[Program]) -> None:
        """Start ``programs`` at once and keep them."""
        self._finite |= {program.name for program in programs if program.finite}
        for program in programs:
            self._running.add(program.name)
            task = asyncio.create_task(self._guard(program), name=f"keep {program.name}")
            self._keepers[program.name] = task

    async def outcome(self) -> Outcome:
        """The first failure, or success once every finite program has ended with 0."""
        return await asyncio.shield(self._outcome)

    def pid(self, name: str) -> int | None:
        """Pid of the current life of program ``name``."""
        child = self._children.get(name)
        return child.pid if child else None

    async def stop(self, names: Sequence[str] | None = None) -> None:
        """SIGTERM to the named programs (all when none are named), SIGKILL after the grace, nothing left behind."""
        chosen = [name for name in (names if names is not None else list(self._keepers)) if name in self._keepers]
        keepers = [self._keepers.pop(name) for name in chosen]
        for task in keepers:
            task.cancel()
        if keepers:
            await asyncio.wait(keepers)
        children = [self._children.pop(name) for name in chosen if name in self._children]
        await asyncio.gather(*(self._stop_child(child) for child in children))

    def kill(self) -> None:
        """At once: SIGKILL to everything. :meth:`stop` then has nothing to wait for."""
        self._grace = 0.0
        kill_marked(self._launch)

    async def _end(self) -> None:
        try:
            await self.stop()
        finally:
            if self._reaper and self._reaper.stdin:
                self._reaper.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    await asyncio.to_thread(self._reaper.wait, 15.0)

    async def _stop_child(self, child: ChildProcess) -> None:
        child.terminate()
        end = time.monotonic() + self._grace
        if child.pid is not None:
            waiting = asyncio.ensure_future(child.wait())
            # Short steps: a second Ctrl-C sets the grace to zero while this waits.
            while not waiting.done() and time.monotonic() < end and self._grace > 0:
                await asyncio.wait([waiting], timeout=0.1)
            if not waiting.done():
                self._report(f"{child.program.name} did not stop within {self._grace:g} s: killed")
            await child.sweep()
            await waiting

    async def _guard(self, program: Program) -> None:
        """A fault of the supervisor itself ends the run instead of leaving a program unwatched."""
        try:
            await self._keep(program)
        except Exception as error:
            self._settle(Outcome(False, f"the supervisor failed on {program.name}: {error!r}", 1, program))

    async def _keep(self, program: Program) -> None:
        policy = RestartPolicy(self._max_restarts, program.finite)
        while True:
            child = ChildProcess(program, self._launch)
            try:
                await child.start()
            except OSError as error:
                self._settle(Outcome(False, f"cannot start {program.name}: {error}", 2, program))
                return
            self._children[program.name] = child
            code = await child.wait()
            await child.sweep()
            decision = policy.decide(code, child.started, time.monotonic())
            if isinstance(decision, Ended):
                self._running.discard(program.name)
                self._report(f"{program.name} has ended")
                if not self._finite & self._running:
                    self._settle(Outcome(True))
                return
            if isinstance(decision, GiveUp):
                reason = f"{program.name} ended with {describe(code)}: {decision.reason}"
                self._settle(Outcome(False, reason, decision.exit_code, program, child.log_tail()))
                return
            assert isinstance(decision, Restart)
            self.restarts += 1
            self._report(f"{program.name} ended with {describe(code)}; restarted in {decision.delay:g} s")
            await asyncio.sleep(decision.delay)

    def _settle(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)


def _start_reaper(launch: str) -> subprocess.Popen[bytes]:
    # A session of its own: what kills the launcher's group or closes its terminal must not reach the reaper.
    command = [sys.executable, "-m", "rollstream.cli.launcher.reaper", launch]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
