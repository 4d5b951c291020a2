"""Reads ROLLOUTS in order and feeds the ledger."""

from __future__ import annotations

import asyncio
import time

import structlog

from rollstream.core.bus import Bus, Reader, Stored
from rollstream.core.bus.errors import BlobMissing
from rollstream.core.wire import Event, Group, MalformedRecord, Rollout, RolloutError
from rollstream.orchestrator.checks import rollout_fault
from rollstream.orchestrator.groups import GroupInProgress, Received
from rollstream.orchestrator.ledger import Ledger

BATCH = 512
_log = structlog.get_logger(__name__)


class Collector:
    """The one reader of ROLLOUTS. ``changed`` is set whenever the ledger has learnt something.

    A record that is not the rollout of its subject counts as an errored one (its subject is taken for ever, so its
    group could not become complete otherwise) and is reported as an event.
    """

    def __init__(self, bus: Bus, ledger: Ledger, changed: asyncio.Event) -> None:
        self._bus = bus
        self._ledger = ledger
        self._changed = changed
        self._reader: Reader = bus.read("ROLLOUTS", from_seq=ledger.position)

    async def catch_up(self, sequence: int) -> None:
        """Read everything up to ``sequence``, which exists already."""
        while self._reader.position <= sequence:
            found = await self._reader.batch(BATCH, timeout=1.0)
            for stored in found:
                await self._take(stored)
            if not found and await self._bus.last_sequence("ROLLOUTS") < self._reader.position:
                break
            if not found and await self._bus.first_sequence("ROLLOUTS") > sequence:
                break  # what was there has been purged since: all of it was decided

    async def follow(self) -> None:
        """Read for ever."""
        while True:
            for stored in await self._reader.batch(BATCH, timeout=2.0):
                await self._take(stored)

    async def look_for(self, entry: GroupInProgress) -> None:
        """Take rollouts of ``entry`` that stand on the bus but were read before the group was open."""
        for member in entry.missing:
            subject = self._bus.subjects.rollout(entry.group.kind, entry.group.group, member)
            stored = await self._bus.get(subject)
            if stored is not None and stored.seq < self._reader.position:
                await self._take(stored)

    async def _take(self, stored: Stored) -> None:
        received = await self._received(stored)
        if received is None:
            self._ledger.position = max(self._ledger.position, stored.seq + 1)
        elif self._ledger.receive(received):
            self._changed.set()

    async def _received(self, stored: Stored) -> Received | None:
        """The rollout at ``stored``, an errored stand-in for what is none, or None if no open group waits for it."""
        owner = self._owner(stored.subject)
        if owner is None:
            return None
        group, member = owner
        try:
            record = stored.record
            if not isinstance(record, Rollout):
                raise MalformedRecord(f"{stored.subject}: expected a Rollout, found {type(record).__name__}")
            if (record.group, record.member, record.kind) != (group.group, member, group.kind):
                raise MalformedRecord(f"{stored.subject}: holds the rollout of {record.group}/{record.member}")
            rollout = await self._bus.resolve(record)
            fault = rollout_fault(rollout)
            if fault is not None:
                raise MalformedRecord(f"{stored.subject}: {fault}")
        except (MalformedRecord, BlobMissing) as error:
            await self._report(stored, error)
            rollout = _stand_in(group, member, error)
        return Received(stored.subject, stored.seq, stored.digest, rollout)

    def _owner(self, subject: str) -> tuple[Group, int] | None:
        """The open group and member that ``subject`` belongs to."""
        head, _, member = subject.rpartition(".")
        group = self._ledger.group_at(head.rpartition(".")[2])
        return (group, int(member)) if group is not None and member.isdigit() and int(member) < group.size else None

    async def _report(self, stored: Stored, error: Exception) -> None:
        _log.error("a record on ROLLOUTS is no rollout; its member counts as failed", error=str(error), seq=stored.seq)
        await self._bus.publish_event(
            Event(
                kind="malformed_rollout",
                component="orchestrator",
                level="error",
                message=f"{error}; the member counts as failed. Look at the worker that wrote it",
                data={"subject": stored.subject, "sequence": stored.seq},
                created=time.time_ns(),
            )
        )

    async def close(self) -> None:
        await self._reader.close()


def _stand_in(group: Group, member: int, error: Exception) -> Rollout:
    now = time.time_ns()
    return Rollout(
        group=group.group, member=member, kind=group.kind, source=group.source, task=group.task,
        timeline=group.timeline, worker="", branches=(), reward=None, started=now, finished=now,
        error=RolloutError(kind=type(error).__name__, message=str(error)),
    )
