"""The commit chain as pure logic: what may follow what. No I/O; the state machine that the tests model."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollstream.core.bus.errors import ChainBroken
from rollstream.core.wire import Batch, CommitRecord, Epoch, OrchestratorState, Rewind


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

    The first record that a reader meets may stand on purged ones, so it is believed when ``head`` is empty and it is
    not itself the beginning.
    """
    if head.seq or not record.previous:
        wrong = violation(head, record)
        if wrong:
            raise ChainBroken(
                f"COMMITS {seq} ({type(record).__name__}): {wrong}",
                hint="the stream was written by something else; restore it, or fork a run from the last checkpoint",
            )
    if isinstance(record, Epoch):
        return ChainHead(seq, digest, record.timeline, record.epoch, head.step, head.state)
    step = record.step if isinstance(record, Batch) else record.from_step
    return ChainHead(seq, digest, record.timeline, record.epoch, step, record.state)
