"""The archive of the chain: one self-contained MessagePack file a batch, with the exact bytes of its records."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from rollstream.core.bus.blobs import arrays_of
from rollstream.core.errors import RollstreamError
from rollstream.core.run.files import atomic_write
from rollstream.core.wire import Batch, MalformedRecord, WeightNotice, decode, decode_as, digest

_NAME = re.compile(r"step_([1-9][0-9]*)\.msgpack")


class ArchiveDamaged(RollstreamError):
    """An archived batch is missing, cannot be read or contradicts itself; the message names the step."""


class BatchArchive(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that batch ``step`` was trained on.

    ``commit`` and ``notice`` are record bytes, ``rollouts`` maps subjects to record bytes, ``blobs`` sha256 to content.
    ``checksum`` covers all other fields, so that no flipped byte goes unseen; :func:`write_archive` fills it in.
    """

    step: int
    timeline: int
    commit: bytes
    rollouts: dict[str, bytes]
    blobs: dict[str, bytes] = {}
    notice: bytes = b""
    checksum: str = ""

    def batch(self) -> Batch:
        """The batch record; raises :class:`ArchiveDamaged`."""
        try:
            return decode_as(Batch, self.commit, where=f"archive of step {self.step}")
        except MalformedRecord as error:
            raise ArchiveDamaged(f"step {self.step}: {error}") from error

    def weight_notice(self) -> WeightNotice:
        """The notice that acknowledged the batch; raises :class:`ArchiveDamaged`."""
        try:
            return decode_as(WeightNotice, self.notice, where=f"archive of step {self.step}")
        except MalformedRecord as error:
            raise ArchiveDamaged(f"step {self.step}: {error}") from error

    def verify(self) -> None:
        """Compare all digests, and see that nothing is missing; raises :class:`ArchiveDamaged` naming step and part."""
        batch = self.batch()
        if batch.step != self.step:
            raise ArchiveDamaged(f"step {self.step}: the file holds the commit of step {batch.step}")
        for sample in batch.samples:
            data = self.rollouts.get(sample.subject)
            if data is None:
                raise ArchiveDamaged(f"step {self.step}: rollout {sample.subject} is missing")
            if digest(data) != sample.digest:
                raise ArchiveDamaged(f"step {self.step}: rollout {sample.subject} differs from the committed one")
        self._verify_blobs(batch)
        if self.notice and self.weight_notice().commit != digest(self.commit):
            raise ArchiveDamaged(f"step {self.step}: the commit is not the one that was trained")

    def _verify_blobs(self, batch: Batch) -> None:
        for name, content in self.blobs.items():
            if digest(content) != name:
                raise ArchiveDamaged(f"step {self.step}: blob {name} holds other bytes")
        try:
            records = [batch, *(decode(data, where=subject) for subject, data in self.rollouts.items())]
        except MalformedRecord as error:
            raise ArchiveDamaged(f"step {self.step}: {error}") from error
        missing = {array.blob for record in records for array in arrays_of(record) if array.blob} - set(self.blobs)
        if missing:
            raise ArchiveDamaged(f"step {self.step}: blob {min(missing)} is missing")


def write_archive(path: Path, archive: BatchArchive) -> None:
    """Write atomically and durably; raises ``DiskFull``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, msgspec.msgpack.encode(msgspec.structs.replace(archive, checksum=_checksum(archive))))


def _checksum(archive: BatchArchive) -> str:
    return digest(msgspec.msgpack.encode(msgspec.structs.replace(archive, checksum="")))


def read_archive(path: Path) -> BatchArchive:
    """Read one batch whose checksum holds; raises :class:`ArchiveDamaged`. :meth:`BatchArchive.verify` looks inside."""
    step = path.stem.replace("_", " ")
    try:
        archive = msgspec.msgpack.decode(path.read_bytes(), type=BatchArchive)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ArchiveDamaged(f"{step}: {path} cannot be read ({error})") from error
    if archive.checksum != _checksum(archive):
        raise ArchiveDamaged(f"{step}: {path} does not fit its checksum: it was changed after it was written")
    if step != f"step {archive.step}":
        raise ArchiveDamaged(f"{step}: {path} holds step {archive.step}")
    return archive


def archived_steps(directory: Path) -> list[int]:
    """Steps that stand in the archive, in order; foreign files are ignored."""
    if not directory.is_dir():
        return []
    matches = (_NAME.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in matches if match)
