"""Named places where a fault test may kill this process: a real SIGKILL, nothing is flushed or released.

``ROLLSTREAM_FAILPOINT=name[:count[:marker]]`` arms one: the ``count``-th time this process passes it, it dies. With a
``marker`` path only one process ever dies of it (the file is created exclusively first), so a restart goes on.
Unarmed, a failpoint costs one comparison.
"""

from __future__ import annotations

import os
import signal
from collections import Counter

_spec = os.environ.get("ROLLSTREAM_FAILPOINT", "")
_passes: Counter[str] = Counter()


def armed(name: str) -> bool:
    """Whether the next :func:`hit` of ``name`` would kill this process."""
    if not _spec or _spec.split(":", 1)[0] != name:
        return False
    _, count, marker = (*_spec.split(":", 2), "", "")[:3]
    if _passes[name] + 1 < int(count or 1):
        return False
    return not (marker and os.path.exists(marker))


def hit(name: str) -> None:
    """Pass the failpoint ``name``."""
    if not _spec or _spec.split(":", 1)[0] != name:
        return
    dies = armed(name)
    _passes[name] += 1
    if not dies:
        return
    _, _, marker = (*_spec.split(":", 2), "", "")[:3]
    if marker:
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGKILL)
