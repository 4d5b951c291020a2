"""What rank 0 alone does: decide, announce, measure, archive, and keep the trainer visible."""

from __future__ import annotations

import asyncio
import time

import structlog

from rollstream.core import failpoints
from rollstream.core.bus import Bus
from rollstream.core.config import TrainerConfig
from rollstream.core.run import RunDir
from rollstream.core.telemetry import MonitorGroup
from rollstream.core.wire import WeightNotice
from rollstream.trainer.decisions import Decision
from rollstream.trainer.engine import Position
from rollstream.trainer.follow import Follower
from rollstream.trainer.gauges import Gauges
from rollstream.trainer.measure import StepTimes, step_metrics
from rollstream.trainer.presence import Presence
from rollstream.trainer.retention import Retention
from rollstream.trainer.step import StepResult
from rollstream.trainer.weights import WeightFiles, Written

_log = structlog.get_logger(__name__)


class Lead:
    """Rank 0's contacts with the outside. Built once per process; the loop calls it in the order of the steps.

    Invariants: a version is announced only after its files are whole; retention runs in one background task at a
    time, whose failure surfaces at the next :meth:`decide`.
    """

    def __init__(
        self, config: TrainerConfig, bus: Bus, presence: Presence, follower: Follower, monitors: MonitorGroup,
        gauges: Gauges, run: RunDir, logged: set[int],
    ) -> None:
        self._config = config
        self._bus = bus
        self._presence = presence
        self._follower = follower
        self._monitors = monitors
        self._gauges = gauges
        self._retention = Retention(bus, run)
        self._files = WeightFiles(run, config.weights.keep_last)
        self._logged = logged
        self._covering: asyncio.Task[None] | None = None

    async def decide(self, patience: float) -> Decision:
        """The next decision, within about ``patience`` seconds."""
        if self._covering is not None and self._covering.done():
            await self.settle()
        return await self._follower.next(patience)

    async def announce(self, position: Position, written: Written) -> None:
        """Tell the world of v{step}; raises ``DigestMismatch`` when it was announced with other weights."""
        failpoints.hit("after_weights_before_notice")
        notice = WeightNotice(
            timeline=position.timeline, version=position.step, transport="filesystem", location=written.location,
            nbytes=written.nbytes, digest=written.digest, commit=position.commit, created=time.time_ns(),
        )
        if not await self._bus.weights.announce(notice):
            _log.info("already announced with the same digest", version=position.step)
        failpoints.hit("after_notice")
        self._files.prune(position.timeline, position.step)
        self._follower.advance(position.step)
        self._presence.at(state="ready", timeline=position.timeline, version=position.step)

    async def measured(
        self, step: int, result: StepResult, times: StepTimes, batch: dict[str, float]
    ) -> None:
        """Log one step: one line of metrics, once in the life of the run."""
        _log.info(
            "step", step=step, loss=round(result.loss, 6), grad_norm=round(result.grad_norm, 4),
            tokens=result.tokens, busy=round(times.busy, 3), waited=round(times.wait, 3),
        )
        self._gauges.measured(step, result, times)
        if step not in self._logged:
            self._monitors.log(step, step_metrics(result, times, batch))

    def cover(self, step: int) -> None:
        """Archive and purge up to the checkpoint at ``step``, in the background."""
        if self._config.ckpt is None or not self._config.ckpt.archive:
            return
        before = self._covering

        async def cover() -> None:
            if before is not None:
                await before
            await self._retention.cover(step, purge=True)

        self._covering = asyncio.create_task(cover(), name="retention")

    async def settle(self) -> None:
        """Wait for the retention that is under way; raises what it raised."""
        if self._covering is not None:
            task, self._covering = self._covering, None
            await task

    async def finish(self, position: Position) -> None:
        """The run is trained: archive what is left, then wait until the run's phase lets the trainer go."""
        self._presence.working("archiving")
        await self.settle()
        if self._config.ckpt is None:
            await self._retention.cover(position.step, purge=False)
        await self._follower.until_run_ends()
