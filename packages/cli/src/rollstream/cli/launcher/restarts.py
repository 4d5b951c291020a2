"""What the end of a component means: pure decisions, no processes."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field

EXIT_USAGE = 2
"""A component that was given bad input: a restart would meet the same input."""

EXIT_STALE = 4
"""A writer that was superseded by another one: a restart would take the run back from it."""

WINDOW = 600.0
"""Seconds in which restarts are counted."""

FAILURES_IN_A_ROW = 5
"""Failures of its own (not kills), each within :data:`WINDOW` of its start, after which another try is pointless:
an engine that takes minutes to fail would otherwise be tried for ever."""

STEADY = 60.0
"""Seconds of life after which a component's next restart is quick again."""


@dataclass(frozen=True)
class Restart:
    """Start it again after ``delay`` seconds."""

    delay: float


@dataclass(frozen=True)
class Ended:
    """It has done its work."""


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on; ``reason`` says why, ``exit_code`` is what the launcher should exit with."""

    reason: str
    exit_code: int


Decision = Restart | Ended | GiveUp


@dataclass
class RestartPolicy:
    """Restarts of one component. ``decide`` is told of each end, in order, with times in monotonic seconds."""

    max_restarts: int
    finite: bool
    first_delay: float = 0.5
    longest_delay: float = 15.0
    _restarts: list[float] = field(default_factory=list)
    _streak: int = 0
    _failures: int = 0

    def decide(self, code: int, started: float, now: float) -> Decision:
        """``code`` as in ``subprocess``: negative for a signal. ``finite`` components may end with 0."""
        if code == 0 and self.finite:
            return Ended()
        if code == EXIT_USAGE:
            return GiveUp("it cannot work with what it was given", EXIT_USAGE)
        if code == EXIT_STALE:
            return GiveUp("another writer has taken this run over", EXIT_STALE)
        self._restarts = [at for at in self._restarts if now - at < WINDOW]
        if len(self._restarts) >= self.max_restarts:
            times = f"{len(self._restarts)} restarts within {WINDOW / 60:g} minutes (max_restarts)"
            return GiveUp(f"it ended with {describe(code)} after {times}", 1)
        self._failures = (self._failures if now - started < WINDOW else 0) + (code > 0)
        if self._failures >= FAILURES_IN_A_ROW:
            return GiveUp(f"it has failed {self._failures} times in a row", 1)
        self._streak = 0 if now - started >= STEADY else self._streak
        delay = min(self.first_delay * 2.0**self._streak, self.longest_delay)
        self._streak += 1
        self._restarts.append(now)
        return Restart(delay)


def describe(code: int) -> str:
    """Human words for an exit status."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
