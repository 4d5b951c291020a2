"""A version directory: safetensors files and the manifest that names them, written last."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from rollstream.core.errors import RollstreamError
from rollstream.core.run.files import atomic_write

MANIFEST = "manifest.json"


class WeightsDamaged(RollstreamError):
    """A version directory is incomplete or holds other bytes than its manifest promises."""


class WeightFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file: name in the directory, size in bytes, sha256 in hex."""

    name: str
    bytes: int
    sha256: str


class WeightsManifest(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json of a version. ``digest`` is over the sorted ``<name> <sha256>`` lines of the files."""

    timeline: int
    version: int
    files: tuple[WeightFile, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)

    @classmethod
    def of(cls, directory: Path, timeline: int, version: int, names: list[str]) -> WeightsManifest:
        """Measure the files ``names`` in ``directory``."""
        files = tuple(
            WeightFile(name=name, bytes=(directory / name).stat().st_size, sha256=sha256_of(directory / name))
            for name in sorted(names)
        )
        return cls(timeline=timeline, version=version, files=files, digest=content_digest(files))

    def write(self, directory: Path) -> None:
        """Write manifest.json; the files must be complete by now."""
        atomic_write(directory / MANIFEST, msgspec.json.encode(self), durable=False)

    @classmethod
    def read(cls, directory: Path) -> WeightsManifest:
        """Read manifest.json; raises :class:`WeightsDamaged`, also when it names a file outside of its directory."""
        try:
            manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise WeightsDamaged(f"{directory / MANIFEST} cannot be read ({error})") from error
        for file in manifest.files:
            if Path(file.name).name != file.name:
                raise WeightsDamaged(f"{directory / MANIFEST} names {file.name!r}, which is no plain file name")
        return manifest

    def verify(self, directory: Path) -> None:
        """Compare every file with its size and sha256; raises :class:`WeightsDamaged` naming the first that differs."""
        for file in self.files:
            path = directory / file.name
            try:
                size = path.stat().st_size
            except OSError as error:
                raise WeightsDamaged(f"{path}: {error.strerror}, though the manifest lists it") from error
            if size != file.bytes:
                raise WeightsDamaged(f"{path}: {size} bytes, the manifest promises {file.bytes}")
            if sha256_of(path) != file.sha256:
                raise WeightsDamaged(f"{path}: its sha256 is not the one in the manifest")
        if content_digest(self.files) != self.digest:
            raise WeightsDamaged(f"{directory / MANIFEST}: the digest does not fit the listed files")


def sha256_of(path: Path) -> str:
    """sha256 of a file in hex."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_digest(files: tuple[WeightFile, ...]) -> str:
    """One digest for the whole content."""
    lines = "".join(f"{file.name} {file.sha256}\n" for file in sorted(files, key=lambda file: file.name))
    return hashlib.sha256(lines.encode()).hexdigest()
