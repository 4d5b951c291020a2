"""Telling a full disk from other faults: torch and safetensors each report it in words of their own."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollstream.core.run.files import disk_full

_NO_ROOM = 1 << 20
"""Bytes that are free, at most, where a write has just failed for want of room."""


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Writes below ``path`` in the block: a failure on a file system without room becomes ``DiskFull``."""
    try:
        yield
    except Exception as error:
        if "No space left" in str(error) or shutil.disk_usage(path).free < _NO_ROOM:
            raise disk_full(path) from error
        raise
