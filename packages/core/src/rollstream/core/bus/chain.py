"""The commit chain on JetStream: one writer at a time, any number of readers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import msgspec
from nats.js.api import Header

from rollstream.core import failpoints
from rollstream.core.bus.chain_state import ChainHead, Lineage, follow, violation
from rollstream.core.bus.errors import ChainBroken, StaleWriter
from rollstream.core.errors import RollstreamError
from rollstream.core.wire import Batch, CommitRecord, Epoch, MalformedRecord, Rewind, digest

if TYPE_CHECKING:
    from rollstream.core.bus.connection import Bus, Stored

RecordT = TypeVar("RecordT", Epoch, Batch, Rewind)


def commit_of(stored: Stored) -> CommitRecord:
    """The commit record in ``stored``; raises ``MalformedRecord`` for anything else."""
    record = stored.record
    if not isinstance(record, Epoch | Batch | Rewind):
        raise MalformedRecord(f"{stored.subject} (sequence {stored.seq}): a {type(record).__name__} has no place there")
    return record


class CommitChain:
    """The writer's side of COMMITS; one per orchestrator process.

    Lifecycle: :meth:`open` reads the head → :meth:`take` appends this process's epoch → :meth:`append` as often as
    wanted. Invariant: every append names the head this writer has read as the expected last sequence, so at most one
    writer succeeds; one that was overtaken gets :class:`StaleWriter` and must stop.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self.head = ChainHead()

    @classmethod
    async def open(cls, bus: Bus) -> CommitChain:
        """Read the chain up to its present head."""
        chain = cls(bus)
        await chain.refresh()
        return chain

    async def refresh(self) -> None:
        """Read what was appended since; raises :class:`ChainBroken` when it does not fit."""
        try:
            await self._read_on()
        except ChainBroken:
            if not await purged_beyond(self._bus, self.head):
                raise
            self.head = ChainHead()
            await self._read_on()

    async def _read_on(self) -> None:
        last = await self._bus.last_sequence("COMMITS")
        if last <= self.head.seq:
            return
        async with self._bus.read("COMMITS", from_seq=self.head.seq + 1) as reader:
            deadline = time.monotonic() + 60.0
            while reader.position <= last:
                found = await reader.batch(256, 2.0)
                for stored in found:
                    self.head = follow(self.head, commit_of(stored), stored.seq, stored.digest)
                if not found and await self._bus.holds_nothing("COMMITS"):
                    raise _emptied(last)
                if time.monotonic() > deadline:
                    raise RollstreamError(
                        f"COMMITS could not be read up to sequence {last} within 60 s",
                        hint="is the NATS server healthy?",
                    )

    async def take(self, writer: str) -> Epoch:
        """Append an epoch: from here on every earlier writer is refused. Retried while others move the head."""
        for _ in range(100):
            await self.refresh()
            epoch = Epoch(
                timeline=self.head.timeline, epoch=self.head.epoch + 1, created=time.time_ns(),
                previous=self.head.digest, writer=writer,
            )  # fmt: skip
            try:
                await self.append(epoch)
            except StaleWriter:
                continue
            failpoints.hit("after_epoch")
            return epoch
        raise RollstreamError(
            "the commit chain could not be taken: other writers kept moving it", hint="stop the others"
        )

    def batch_fields(self) -> dict[str, object]:
        """The chain fields of the next record: ``timeline``, ``epoch``, ``created``, ``previous``."""
        return {
            "timeline": self.head.timeline,
            "epoch": self.head.epoch,
            "created": time.time_ns(),
            "previous": self.head.digest,
        }

    async def append(self, record: Epoch | Batch | Rewind) -> Stored:
        """Append ``record``, exactly once; raises :class:`StaleWriter` when the head has moved.

        A publish whose acknowledgement was lost is told from a refused one by reading back: equal bytes are success.
        """
        wrong = violation(self.head, record)
        if wrong:
            raise ChainBroken(f"refusing to append a {type(record).__name__}: {wrong}")
        data = await self._bus.prepare(record)
        subject = self._bus.subjects.commits
        expected = self.head.seq
        if isinstance(record, Batch):
            # The payload is flushed before the failpoint, so that the server has it while this process dies.
            if failpoints.armed("after_commit_before_ack"):
                headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(expected)}
                await self._bus.client.publish(subject, data, headers=headers)
                await self._bus.client.flush()
            failpoints.hit("after_commit_before_ack")

        seq = await self._bus.append(subject, data, after=expected, beaten=lambda: self._read_back(expected, data))
        self.head = follow(self.head, record, seq, digest(data))
        return self._bus.stored(subject, seq, data)

    async def _read_back(self, expected: int, data: bytes) -> int:
        """Sequence of our own record when it is the one that followed ``expected``."""
        async with self._bus.read("COMMITS", from_seq=expected + 1) as reader:
            stored = await reader.next(5.0)
        if stored is not None and stored.data == data:
            return stored.seq
        if stored is None:
            if await self._bus.holds_nothing("COMMITS"):
                raise _emptied(expected)
            raise TimeoutError("the head moved, but nothing can be read behind it yet")
        who = getattr(commit_of(stored), "writer", "another writer")
        raise StaleWriter(
            f"the commit chain moved on without this process (sequence {stored.seq}, by {who})",
            hint="another orchestrator has taken over this run; this one stops",
        )


async def purged_beyond(bus: Bus, head: ChainHead) -> bool:
    """Whether a purge has overtaken a reader at ``head``: what follows there is gone, so nothing there can fit.

    A checkpoint purges what it covers while others may still be reading it; they begin again at what is left.
    """
    return 0 < head.seq < await bus.first_sequence("COMMITS") - 1


def _emptied(last: int) -> ChainBroken:
    return ChainBroken(
        f"COMMITS is empty, though it once reached sequence {last}",
        hint="was it purged by hand? resume from the last checkpoint",
    )


class ChainReader:
    """The trainer's side of COMMITS: the batches of the current lineage, in order, each once.

    Lifecycle: the first :meth:`next` reads what stands and drops batches that a rewind made void; then it follows.
    Invariant: yields after_step + 1, after_step + 2, … without a gap (see :class:`Lineage`). Not for concurrent use.
    """

    def __init__(self, bus: Bus, *, after_step: int = 0, timeline: int = 1) -> None:
        self._bus = bus
        self._reader = bus.read("COMMITS")
        self._lineage: Lineage[Stored] = Lineage(after_step, timeline)
        self._caught_up_to: int | None = None

    async def next(self, timeout: float) -> tuple[Stored, Batch] | None:
        """The next batch, or None after ``timeout`` seconds; raises :class:`ChainBroken`, :class:`ChainRewound`."""
        ends = time.monotonic() + timeout
        if self._caught_up_to is None:
            self._caught_up_to = await self._bus.last_sequence("COMMITS")
        while True:
            if self._reader.position > self._caught_up_to and (taken := self._lineage.take()):
                return taken
            remaining = ends - time.monotonic()
            if remaining <= 0:
                return None
            await self._read_on(remaining)

    async def _read_on(self, seconds: float) -> None:
        found = await self._reader.batch(256, seconds)
        try:
            for stored in found:
                self._lineage.accept(commit_of(stored), stored.seq, stored.digest, stored)
        except ChainBroken:
            if not await purged_beyond(self._bus, self.head):
                raise
            await self._reader.close()
            self._reader = self._bus.read("COMMITS")
            self._lineage.restart()

    @property
    def head(self) -> ChainHead:
        """The chain as far as it was read."""
        return self._lineage.head

    async def close(self) -> None:
        """Remove the consumer behind this reader."""
        await self._reader.close()


def with_chain(record: RecordT, head: ChainHead) -> RecordT:
    """``record`` re-addressed to follow ``head`` (tests and rebuilds)."""
    return msgspec.structs.replace(record, timeline=head.timeline, epoch=head.epoch, previous=head.digest)
