"""The commit chain as pure logic: what may follow what. No I/O; the state machine that the tests model."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rollstream.core.bus.errors import ChainBroken, ChainRewound
from rollstream.core.wire import Batch, CommitRecord, Epoch, OrchestratorState, Rewind

T = TypeVar("T")

_FOREIGN = "the stream was written by something else; restore it, or fork a run from the last checkpoint"
_RESUME = "resume from the newest checkpoint of the present timeline"


@dataclass(frozen=True)
class ChainHead:
    """The chain up to one record. ``seq`` is its stream sequence (0: the chain is empty), ``digest`` its bytes'."""

    seq: int = 0
    digest: str = ""
    timeline: int = 1
    epoch: int = 0
    step: int = 0
    state: OrchestratorState = field(default_factory=OrchestratorState)


def violation(head: ChainHead, record: CommitRecord) -> str | None:
    """Why ``record`` may not follow ``head``, or None when it may."""
    if record.previous != head.digest:
        return f"its previous is {record.previous[:12] or 'empty'}, the head is {head.digest[:12] or 'empty'}"
    if isinstance(record, Epoch):
        if record.epoch != head.epoch + 1:
            return f"epoch {record.epoch} after epoch {head.epoch}"
        return (
            None if record.timeline == head.timeline else f"timeline {record.timeline}, the head's is {head.timeline}"
        )
    if record.epoch != head.epoch:
        return f"written by epoch {record.epoch}, the chain belongs to epoch {head.epoch}"
    if isinstance(record, Rewind):
        if record.timeline <= head.timeline or record.parent != head.timeline:
            return f"timeline {record.timeline} of {record.parent} after timeline {head.timeline}"
        return None if 0 <= record.from_step <= head.step else f"rewinds to step {record.from_step} of {head.step}"
    if record.timeline != head.timeline:
        return f"timeline {record.timeline}, the head's is {head.timeline}"
    if record.step != head.step + 1:
        return f"step {record.step} after step {head.step}"
    return None if record.version == record.step - 1 else f"step {record.step} trains on v{record.version}"


def follow(head: ChainHead, record: CommitRecord, seq: int, digest: str) -> ChainHead:
    """The head after ``record``; raises :class:`ChainBroken`.

    The first record that a reader meets may stand on purged ones: it is believed when ``head`` is empty and it carries
    the state as of itself. An epoch does not, so a purge that leaves one in front has taken the state away.
    """
    where = f"COMMITS {seq} ({type(record).__name__})"
    if head.seq or not record.previous:
        wrong = violation(head, record)
        if wrong:
            raise ChainBroken(f"{where}: {wrong}", hint=_FOREIGN)
    elif isinstance(record, Epoch):
        raise ChainBroken(
            f"{where}: the batch before it is gone, and with it the state of the run",
            hint="COMMITS was purged by hand; fork a run from the last checkpoint",
        )
    if isinstance(record, Epoch):
        return ChainHead(seq, digest, record.timeline, record.epoch, head.step, head.state)
    step = record.step if isinstance(record, Batch) else record.from_step
    return ChainHead(seq, digest, record.timeline, record.epoch, step, record.state)


class Lineage(Generic[T]):
    """The batches of the present lineage after ``last``, as a reader that trained ``last`` on ``timeline`` needs them.

    Lifecycle: :meth:`accept` the records of the chain in order, each with an item of the caller's, and :meth:`take`
    between them, at first only once the present end of the chain was accepted: a rewind there voids what stands before.
    Invariant: what is taken are the steps last + 1, last + 2, … of one lineage that contains (last, timeline).
    Otherwise :class:`ChainRewound` (that position is void) or :class:`ChainBroken` (steps are missing, here or there).
    """

    def __init__(self, last: int, timeline: int) -> None:
        self.head = ChainHead()
        self.last = last
        self._timeline = timeline
        self._ready: deque[tuple[T, Batch]] = deque()

    def restart(self) -> None:
        """Forget what was accepted, not what was taken: the chain is read again from what is left of it."""
        self.head = ChainHead()
        self._ready.clear()

    def accept(self, record: CommitRecord, seq: int, digest: str, item: T) -> None:
        """The next record of the chain."""
        first = not self.head.seq
        self.head = follow(self.head, record, seq, digest)
        if isinstance(record, Rewind):
            if record.from_step < self.last and record.timeline > self._timeline:
                raise ChainRewound(
                    f"the run went back to step {record.from_step}, this reader stands at step {self.last}",
                    hint=_RESUME,
                )
            while self._ready and self._ready[-1][1].step > record.from_step:
                self._ready.pop()
        elif first and record.timeline > self._timeline:
            raise ChainRewound(
                f"this reader stands at step {self.last} of timeline {self._timeline}; what is left of the chain "
                f"begins on timeline {record.timeline} and no longer tells where that left off",
                hint=_RESUME,
            )
        elif isinstance(record, Batch) and record.step > self.last:
            self._ready.append((item, record))

    def take(self) -> tuple[T, Batch] | None:
        """The next batch, None when there is none yet. Raises instead of waiting for one that can never come."""
        if not self.head.seq:
            return None
        if self.head.timeline < self._timeline or self.head.step < self.last:
            raise ChainBroken(
                f"this reader stands at step {self.last} of timeline {self._timeline}, "
                f"the chain ends at step {self.head.step} of timeline {self.head.timeline}",
                hint="the NATS store is older than the checkpoint: restore it, or resume from an earlier checkpoint",
            )
        if self.head.step == self.last:
            return None
        if not self._ready or self._ready[0][1].step != self.last + 1:
            found = f"step {self._ready[0][1].step}" if self._ready else f"a rewind to step {self.head.step}"
            raise ChainBroken(
                f"expected step {self.last + 1} on COMMITS, found {found}",
                hint="batches up to there were purged after a checkpoint: resume from that checkpoint",
            )
        item, batch = self._ready.popleft()
        self.last = batch.step
        return item, batch
