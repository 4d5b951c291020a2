"""What happens to the bus once a checkpoint covers a step: archive first, then purge ROLLOUTS, then COMMITS.

Each stage can be repeated: a crash between any two leaves the next run to do the rest.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from rollstream.core import failpoints
from rollstream.core.bus import Bus, Stored
from rollstream.core.bus.blobs import arrays_of
from rollstream.core.errors import RollstreamError
from rollstream.core.run import ArchiveDamaged, BatchArchive, RunDir, read_archive, write_archive
from rollstream.core.wire import Batch, digest
from rollstream.trainer.rollouts import IN_FLIGHT, open_rollout

_log = structlog.get_logger(__name__)


class Retention:
    """Moves covered steps from the bus to ``batches/`` of the run directory. Not for concurrent use."""

    def __init__(self, bus: Bus, run: RunDir) -> None:
        self._bus = bus
        self._run = run
        self._archived = 0

    async def cover(self, step: int, *, purge: bool) -> None:
        """Archive every batch up to ``step`` that COMMITS still holds; then, with ``purge``, take them off the bus.

        The commit of ``step`` itself stays: it is what the chain goes on from.
        """
        failpoints.hit("after_checkpoint_before_archive")
        last = await self._archive(step)
        if last is None or not purge:
            return
        stored, batch = last
        await self._bus.purge_below("ROLLOUTS", batch.state.low_water)
        failpoints.hit("between_purges")
        await self._bus.purge_below("COMMITS", stored.seq)
        _log.info("covered batches moved to the archive", step=step, low_water=batch.state.low_water)

    async def _archive(self, step: int) -> tuple[Stored, Batch] | None:
        """Archive what is missing; the commit of ``step``, or None when the stream holds none up to it."""
        found: tuple[Stored, Batch] | None = None
        end = await self._bus.last_sequence("COMMITS")
        async with self._bus.read("COMMITS") as reader:
            while reader.position <= end and (found is None or found[1].step < step):
                for stored in await reader.batch(64, 5.0):
                    record = stored.record
                    if not isinstance(record, Batch) or record.step > step:
                        continue
                    found = (stored, record)
                    if record.step > self._archived:
                        await self._archive_one(stored, record)
                        self._archived = record.step
        return found

    async def _archive_one(self, stored: Stored, batch: Batch) -> None:
        path = self._run.batch(batch.step)
        if await asyncio.to_thread(_holds, path, stored.data):
            return
        notice = await self._bus.get(self._bus.subjects.weights(batch.timeline, batch.step))
        if notice is None:
            raise RollstreamError(f"step {batch.step} is trained, but v{batch.step} was never announced")
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def fetch(subject: str, expected: str) -> tuple[str, bytes]:
            async with gate:
                found = await self._bus.get(subject)
            if found is None:
                raise RollstreamError(
                    f"step {batch.step}: rollout {subject} left the bus before it was archived",
                    hint="was ROLLOUTS purged by hand? this step can never be replayed",
                )
            open_rollout(subject, found.data, expected, batch.step)
            return subject, found.data

        subjects = {sample.subject: sample.digest for sample in batch.samples}
        rollouts = dict(await asyncio.gather(*(fetch(subject, expected) for subject, expected in subjects.items())))
        blobs = await self._blobs(batch, rollouts)
        archive = BatchArchive(
            step=batch.step, timeline=batch.timeline, commit=stored.data, rollouts=rollouts, blobs=blobs,
            notice=notice.data,
        )
        await asyncio.to_thread(write_archive, path, archive)

    async def _blobs(self, batch: Batch, rollouts: dict[str, bytes]) -> dict[str, bytes]:
        records = [batch, *(open_rollout(name, data, digest(data), batch.step) for name, data in rollouts.items())]
        spilled = {array.blob: array.nbytes for record in records for array in arrays_of(record) if array.blob}
        return {name: await self._bus.get_blob(name, size) for name, size in spilled.items()}


def _holds(path: Path, commit: bytes) -> bool:
    """Whether the archive at ``path`` is whole and of this commit."""
    try:
        archive = read_archive(path)
        archive.verify()
    except ArchiveDamaged:
        return False
    return archive.commit == commit
