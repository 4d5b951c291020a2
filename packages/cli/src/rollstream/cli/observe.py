"""Asking bus and store where a run stands."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable
from typing import Any

from rollstream.cli.snapshot import Facts, Member, Wait
from rollstream.core.bus import Bus
from rollstream.core.store import Role, Store
from rollstream.core.wire import Batch

LOOK_TIMEOUT = 3.0
"""Seconds that one look may take; what does not answer is a problem to show, not a reason to stop."""

ROLES: tuple[Role, ...] = ("inference", "router", "trainer", "orchestrator", "env-worker")


class Observer:
    """Looks at a run through its servers; never raises for a server that is away. It does not own the connections."""

    def __init__(self, bus: Bus, store: Store, timeline: int) -> None:
        self._bus = bus
        self._store = store
        self._timeline = timeline
        self._last = Facts()

    async def look(self) -> Facts:
        """Ask everything once; what was known stays where a server does not answer."""
        answers = await asyncio.gather(_ask("NATS", self._look_at_bus()), _ask("Redis", self._look_at_store()))
        problems = "; ".join(answer for answer in answers if isinstance(answer, str))
        known: dict[str, Any] = {}
        for answer in answers:
            if isinstance(answer, dict):
                known |= answer
        self._last = dataclasses.replace(self._last, **known, problem=problems)
        return self._last

    async def _look_at_bus(self) -> dict[str, Any]:
        intent = await self._bus.intent.get()
        newest = await self._bus.weights.newest(self._timeline)
        head = await self._bus.get(self._bus.subjects.commits)
        found: dict[str, Any] = {"phase": str(intent.phase), "paused": intent.paused, "reason": intent.reason}
        if newest is not None:
            found["newest_version"] = newest.version
        record = head.record if head is not None else None
        if isinstance(record, Batch):
            found["committed"] = record.step
        return found

    async def _look_at_store(self) -> dict[str, Any]:
        members = [
            Member(
                role=lease.role, id=lease.id, state=lease.state, version=lease.version, inflight=lease.inflight,
                kv_usage=lease.kv_usage, detail=lease.detail,
            )
            for role in ROLES
            for lease in await self._store.registry.list(role)
        ]  # fmt: skip
        # What an instance said last outlives it; only who still holds a lease waits.
        present = {(member.role, member.id) for member in members}
        now = time.time()
        waits = [
            Wait(
                component=entry.component, id=entry.id, reason=entry.waiting, seconds=max(0.0, now - entry.since),
                left=None if entry.deadline is None else entry.deadline - now, detail=entry.detail,
            )
            for entry in await self._store.progress.list()
            if entry.waiting and (entry.component, entry.id) in present
        ]  # fmt: skip
        return {"members": members, "waits": waits}


async def _ask(server: str, question: Awaitable[dict[str, Any]]) -> dict[str, Any] | str:
    try:
        async with asyncio.timeout(LOOK_TIMEOUT):
            return await question
    except TimeoutError:
        return f"{server} does not answer"
    except Exception as error:
        return f"{server}: {error or type(error).__name__}"
