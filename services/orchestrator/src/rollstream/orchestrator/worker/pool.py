"""Leases episodes of several sources and plays a bounded number of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from rollstream.core.bus import EpisodeLease, EpisodeQueue
from rollstream.orchestrator.worker.episodes import EpisodePlayer

PULL_SECONDS = 2.0

_log = structlog.get_logger(__name__)


class EpisodePool:
    """Pulls work while there are free slots.

    Lifecycle: :meth:`run` until it is cancelled; then the episodes in flight are cancelled too, which hands their
    leases back. An exception that an episode's handling lets through ends the pool with it.
    Invariant: at most ``concurrency`` episodes are leased at once; free slots are shared among the waiting sources.
    """

    def __init__(
        self, queues: Mapping[str, EpisodeQueue], players: Mapping[tuple[str, str], EpisodePlayer],
        concurrency: int,
    ) -> None:
        self._queues = queues
        self._players = players
        self._concurrency = concurrency
        self._reserved = 0
        self._freed = asyncio.Event()
        self.running: set[asyncio.Task[None]] = set()
        self.finished = 0
        self.failed = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues.values():
                tasks.create_task(self._serve(queue, tasks))

    async def _serve(self, queue: EpisodeQueue, tasks: asyncio.TaskGroup) -> None:
        while True:
            slots = await self._reserve()
            try:
                leases = await queue.pull(slots, PULL_SECONDS)
            finally:
                self._reserved -= slots
            for lease in leases:
                task = tasks.create_task(self._play(lease))
                self.running.add(task)
                task.add_done_callback(self._done)

    async def _reserve(self) -> int:
        """Slots to pull for: this source's share of the free ones, at least one."""
        while (free := self._concurrency - len(self.running) - self._reserved) < 1:
            self._freed.clear()
            await self._freed.wait()
        slots = max(1, free // len(self._queues))
        self._reserved += slots
        return slots

    def _done(self, task: asyncio.Task[None]) -> None:
        self.running.discard(task)
        self._freed.set()

    async def _play(self, lease: EpisodeLease) -> None:
        episode = lease.episode
        player = self._players.get((episode.kind, episode.source))
        if player is None:
            _log.error("no such source here; handed back", kind=episode.kind, source=episode.source)
            await lease.nak(5.0)
            return
        rollout = await player.handle(lease)
        self.finished += 1
        if rollout is not None and rollout.error is not None:
            self.failed += 1
            _log.warning(
                "episode failed", group=rollout.group, member=rollout.member, error=rollout.error.kind,
                message=rollout.error.message[:300],
            )
