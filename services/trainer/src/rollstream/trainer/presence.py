"""The trainer's lease and what it waits for, in the store; losing the store costs visibility, never training."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

import msgspec
import structlog
from redis.exceptions import RedisError

from rollstream.core.store import Lease, Store
from rollstream.core.store.registry import State

_log = structlog.get_logger(__name__)

RENEW_SECONDS = 2.0
LEASE_SECONDS = 6.0


class Presence:
    """Keeps one lease and one progress entry current.

    Lifecycle: :meth:`run` as a supervised task; the setters only note what is true and wake it. It never raises for a
    store that is away: it says so once and goes on.
    """

    def __init__(self, store: Store, model: str, metrics: str = "", bus_waits: Callable[[], str] = str) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}"
        self._store = store
        self._bus_waits = bus_waits
        self._lease = Lease(
            id=self.id, role="trainer", model=model, metrics=metrics, pid=os.getpid(), host=socket.gethostname(),
            timeline=1,
        )
        self._waiting = ""
        self._detail = "starting"
        self._deadline: float | None = None
        self._changed = asyncio.Event()
        self._away = False

    def at(self, *, state: State, timeline: int, version: int) -> None:
        """Which version the trainer has made."""
        self._lease = _replaced(self._lease, state=state, timeline=timeline, version=version)
        self._changed.set()

    def waiting(self, reason: str, detail: str, deadline: float | None = None) -> None:
        """The trainer waits for ``reason`` (``detail`` for people), until ``deadline`` (Unix time) if it has one."""
        self._waiting, self._detail, self._deadline = reason, detail, deadline
        self._changed.set()

    def working(self, detail: str) -> None:
        """The trainer works."""
        self._waiting, self._detail, self._deadline = "", detail, None
        self._changed.set()

    async def run(self) -> None:
        """Renew for ever; on cancellation drop the lease."""
        try:
            while True:
                self._changed.clear()
                await self._write()
                try:
                    async with asyncio.timeout(RENEW_SECONDS):
                        await self._changed.wait()
                except TimeoutError:
                    pass
        finally:
            await self._drop()

    async def _write(self) -> None:
        try:
            await self._store.registry.put(_replaced(self._lease, detail=self._detail), LEASE_SECONDS)
            waiting = self._bus_waits() or self._waiting
            if waiting:
                await self._store.progress.waiting("trainer", self.id, waiting, self._deadline, self._detail)
            else:
                await self._store.progress.working("trainer", self.id, self._detail)
        except (RedisError, OSError) as error:
            if not self._away:
                _log.warning("the store is away; status shows less until it is back", error=str(error))
            self._away = True
        else:
            self._away = False

    async def _drop(self) -> None:
        try:
            async with asyncio.timeout(1.0):
                await self._store.registry.drop("trainer", self.id)
        except (RedisError, OSError):
            pass  # it expires by itself


def _replaced(lease: Lease, **changes: object) -> Lease:
    return msgspec.structs.replace(lease, **changes)
