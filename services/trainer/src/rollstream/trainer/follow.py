"""Rank 0's view of the run: which commit comes next, when to save, when to end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import structlog

from rollstream.core.bus import Bus, ChainReader, Phase, Stored
from rollstream.core.wire import Batch
from rollstream.trainer.decisions import Decision, Finish, SaveCheckpoint, Stop, Train, Wait
from rollstream.trainer.presence import Presence

_log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
"""Longest single wait on the chain, and how often the phase is looked at meanwhile."""

FINAL_SECONDS = 60.0
"""How long a trainer that is done waits for the run to leave ``running`` before it ends anyway."""


class Follower:
    """Waits on the bus for the ranks.

    Lifecycle: built with the step training stands at; :meth:`next` after each decision was carried out, ``advance``
    after each trained step. Commands and signals only set flags here; they take effect at the next step boundary.
    Invariant: a Train decision is always for the present step + 1.
    """

    def __init__(
        self, bus: Bus, presence: Presence, stop: asyncio.Event, *, step: int, timeline: int, max_steps: int
    ) -> None:
        self._bus = bus
        self._presence = presence
        self._stop = stop
        self._chain: ChainReader = bus.chain_reader(after_step=step, timeline=timeline)
        self._step = step
        self._max_steps = max_steps
        self._coming: asyncio.Task[tuple[Stored, Batch] | None] | None = None
        self._save = asyncio.Event()
        self._stop_reason = ""
        self._intent_at_start = 0

    async def start(self) -> None:
        """Note the phase as it stands, and answer ``checkpoint`` and ``stop`` on the bus."""
        # An earlier attempt may have left the run failed or done: only a change from here on is news.
        self._intent_at_start = (await self._bus.intent.get()).changed
        await self._bus.commands.serve("trainer", {"checkpoint": self._on_checkpoint, "stop": self._on_stop})

    async def _on_checkpoint(self, _: dict[str, Any]) -> dict[str, Any]:
        self._save.set()
        return {"step": self._step}

    async def _on_stop(self, payload: dict[str, Any]) -> dict[str, Any]:
        self._stop_reason = str(payload.get("reason", "asked to stop"))
        self._stop.set()
        return {"step": self._step}

    def advance(self, step: int) -> None:
        """Step ``step`` is trained; begin to wait for the next commit."""
        self._step = step

    async def next(self, patience: float) -> Decision:
        """What to do now; :class:`Wait` after ``patience`` seconds without news."""
        if self._step >= self._max_steps:
            return Finish()
        ends = time.monotonic() + patience
        self._presence.waiting("batch", f"batch {self._step + 1}")
        while True:
            if self._stop.is_set():
                return Stop(self._stop_reason or "a signal", checkpoint=True)
            if self._save.is_set():
                self._save.clear()
                return SaveCheckpoint()
            found = await self._look(min(LOOK_SECONDS, max(0.0, ends - time.monotonic())))
            if found is not None:
                stored, batch = found
                self._presence.working(f"training step {batch.step}")
                return Train(stored.data, stored.seq, stored.digest)
            ending = await self._ending()
            if ending is not None:
                return ending
            if time.monotonic() >= ends:
                return Wait()

    async def _look(self, seconds: float) -> tuple[Stored, Batch] | None:
        # The task outlives this look: cancelling a fetch could lose a message that is already on its way.
        if self._coming is None:
            self._coming = asyncio.create_task(self._chain.next(LOOK_SECONDS), name="next commit")
        wakers = [asyncio.create_task(self._stop.wait()), asyncio.create_task(self._save.wait())]
        try:
            await asyncio.wait([self._coming, *wakers], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waker in wakers:
                waker.cancel()
        if not self._coming.done():
            return None
        task, self._coming = self._coming, None
        return task.result()

    async def _ending(self) -> Decision | None:
        """A run whose orchestrator commits no more ends before ``max_steps``; a failed one stops."""
        intent = await self._bus.intent.get()
        if intent.changed == self._intent_at_start:
            return None
        if intent.phase is Phase.FAILED:
            return Stop(f"the run failed: {intent.reason or 'no reason given'}", checkpoint=True)
        if intent.phase in (Phase.FINALISING, Phase.DONE) and self._chain.head.step <= self._step:
            return Finish()
        return None

    async def until_run_ends(self) -> None:
        """Wait, at most :data:`FINAL_SECONDS`, until the phase says that this trainer is not needed any more."""
        deadline = time.time() + FINAL_SECONDS
        self._presence.waiting("phase", "the orchestrator to finish", deadline)
        while time.time() < deadline and not self._stop.is_set():
            intent = await self._bus.intent.get()
            if intent.phase in (Phase.DRAINING, Phase.FINALISING, Phase.DONE, Phase.FAILED):
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.3):
                    await self._stop.wait()
        _log.warning("the run's phase did not move on; the trainer is done and ends", waited_s=FINAL_SECONDS)

    async def close(self) -> None:
        """Stop waiting and remove the reader."""
        if self._coming is not None:
            self._coming.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._coming
        await self._chain.close()
