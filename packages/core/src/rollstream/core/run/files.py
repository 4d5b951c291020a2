"""Writing files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from pathlib import Path

from rollstream.core.errors import UsageError


class DiskFull(UsageError):
    """The file system has no room left. What stood before still stands."""


def atomic_write(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Write ``data`` to ``path``: temporary name, fsync, rename, fsync of the directory.

    ``durable=False`` leaves out the syncs, for files that can be made again. Raises :class:`DiskFull`.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with draft.open("wb") as stream:
            stream.write(data)
            stream.flush()
            if durable:
                os.fsync(stream.fileno())
        draft.replace(path)
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        raise


def disk_full(path: Path) -> DiskFull:
    """The error for a write to ``path`` that found no room."""
    free = shutil.disk_usage(path.parent).free
    return DiskFull(
        f"no room for {path}: {free / 2**20:.1f} MiB are free",
        hint="free some space, then go on with --resume; nothing that was written before is lost",
    )


def sync_directory(path: Path) -> None:
    """Make renames inside ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
