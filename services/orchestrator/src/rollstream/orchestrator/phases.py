"""The run's phase: which one follows, and its single writer."""

from __future__ import annotations

from rollstream.core.bus import Bus, Phase

ORDER = (Phase.CREATED, Phase.STARTING, Phase.RUNNING, Phase.DRAINING, Phase.FINALISING, Phase.DONE)


def phase_of(committed: int, newest: int, max_steps: int, *, evaluated: bool) -> Phase:
    """The phase of a run that stands there. ``evaluated``: no evaluation is due or under way.

    starting until the base model is announced; running until the last batch is committed; draining until its version
    is announced; finalising until the last evaluation is scored.
    """
    if newest < 0:
        return Phase.STARTING
    if committed < max_steps:
        return Phase.RUNNING
    if newest < max_steps:
        return Phase.DRAINING
    return Phase.DONE if evaluated else Phase.FINALISING


class PhaseWriter:
    """Writes the phase on behalf of one orchestrator epoch.

    Invariant: a run's phase only moves forward, except that a new epoch may take up a failed run, or a finished one
    that was given more steps. A write by a replaced orchestrator raises ``StaleWriter``.
    """

    def __init__(self, bus: Bus, epoch: int) -> None:
        self._bus = bus
        self._epoch = epoch
        self.current: Phase | None = None

    async def advance(self, phase: Phase, reason: str = "") -> bool:
        """Make ``phase`` the run's phase unless this writer has it there or beyond already; whether it wrote."""
        if self.current is not None and (self.current.final or ORDER.index(phase) <= ORDER.index(self.current)):
            return False
        await self._bus.intent.set_phase(phase, epoch=self._epoch, reason=reason)
        self.current = phase
        return True

    async def fail(self, reason: str) -> None:
        """The run cannot go on; ``reason`` is what the operator reads."""
        await self._bus.intent.set_phase(Phase.FAILED, epoch=self._epoch, reason=reason)
        self.current = Phase.FAILED
