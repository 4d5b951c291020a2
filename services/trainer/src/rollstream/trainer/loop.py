"""The trainer's loop, the same on every rank: carry out what rank 0 decides, in step."""

from __future__ import annotations

import time
from dataclasses import dataclass

import structlog

from rollstream.core.bus import Bus
from rollstream.core.config import TrainerConfig
from rollstream.core.errors import RollstreamError
from rollstream.core.wire import Batch, decode_as, encode
from rollstream.trainer.compute import Compute
from rollstream.trainer.decisions import Decision, Finish, SaveCheckpoint, Stop, Train
from rollstream.trainer.engine import Engine, Position
from rollstream.trainer.lead import Lead
from rollstream.trainer.measure import StepTimes
from rollstream.trainer.rollouts import fetch_samples, lengths

_log = structlog.get_logger(__name__)


class UnexpectedStep(RollstreamError):
    """A commit is not for the step that comes next."""


@dataclass
class _Pace:
    """When this rank became free, to tell waiting from working."""

    free: float


class RankLoop:
    """One rank from its start to the end of the run.

    Lifecycle: :meth:`run` once. ``lead`` is given on rank 0 only: it decides, announces, measures and archives.
    Invariant: batch n is trained on v{n−1} exactly once in this process, and v{n} is announced before n + 1 is begun.
    """

    def __init__(
        self, config: TrainerConfig, bus: Bus, compute: Compute, engine: Engine, position: Position,
        orchestrator: bytes, lead: Lead | None,
    ) -> None:
        self._config = config
        self._bus = bus
        self._compute = compute
        self._engine = engine
        self._position = position
        self._orchestrator = orchestrator
        self._lead = lead
        self._saved = position.step
        self._weights = ""
        self._pace = _Pace(time.monotonic())

    async def run(self) -> bool:
        """Follow the chain to its end; True when the run is complete, False when it was stopped before."""
        await self._publish()
        self._pace.free = time.monotonic()
        while True:
            decision = await self._decide()
            if isinstance(decision, Train):
                await self._train(decision)
            elif isinstance(decision, SaveCheckpoint):
                await self._save()
            elif isinstance(decision, Stop):
                return await self._stop(decision)
            elif isinstance(decision, Finish):
                await self._finish()
                return True

    async def _decide(self) -> Decision:
        # Half the collectives' deadline: the other ranks are kept waiting in short pieces.
        mine = await self._lead.decide(self._config.dist_timeout / 2) if self._lead else None
        decision: Decision = await self._compute(self._engine.ranks.from_lead, mine)
        return decision

    async def _train(self, order: Train) -> None:
        begun = time.monotonic()
        batch = decode_as(Batch, order.commit, where=f"COMMITS {order.seq}")
        step = batch.step
        if step != self._position.step + 1:
            raise UnexpectedStep(
                f"COMMITS {order.seq} is batch {step}, this trainer is at step {self._position.step}",
                hint="restart the trainer: it resumes from its newest checkpoint",
            )
        bins = self._engine.bins(lengths(batch))
        samples = await fetch_samples(self._bus, batch, {index for entry in bins for index in entry.samples})
        fetched = time.monotonic()
        result = await self._compute(self._engine.train, step, bins, samples)
        trained = time.monotonic()
        self._position = Position(step, batch.timeline, order.digest)
        self._orchestrator = encode(batch.state)
        await self._publish()
        published = time.monotonic()
        if self._lead is not None:
            times = StepTimes(begun - self._pace.free, fetched - begun, trained - fetched, published - trained)
            await self._lead.measured(step, result, times, batch.metrics)
        self._pace.free = time.monotonic()
        ckpt = self._config.ckpt
        if ckpt is not None and step % ckpt.interval == 0:
            await self._save()

    async def _publish(self) -> None:
        """Write the present version and announce it (v0, or the checkpoint's, at the start)."""
        position = self._position
        written = await self._compute(self._engine.write_weights, position.timeline, position.step)
        if self._lead is not None and written is not None:
            self._weights = written.digest
            await self._lead.announce(position, written)

    async def _save(self) -> None:
        if self._config.ckpt is None or self._saved == self._position.step:
            return
        begun = time.monotonic()
        await self._compute(self._engine.save_checkpoint, self._position, self._weights, self._orchestrator)
        self._saved = self._position.step
        if self._lead is not None:
            _log.info("checkpoint", step=self._saved, seconds=round(time.monotonic() - begun, 3))
            self._lead.cover(self._saved)
        self._pace.free = time.monotonic()

    async def _stop(self, decision: Stop) -> bool:
        if decision.checkpoint:
            await self._save()
        if self._lead is not None:
            _log.warning("stopped before the end", step=self._position.step, reason=decision.reason)
            await self._lead.settle()
        return False

    async def _finish(self) -> None:
        await self._save()
        if self._lead is not None:
            await self._lead.finish(self._position)
        await self._compute(self._engine.ranks.barrier)
