"""No orphan: how what belongs to a launch is found again.

Three ties, each for what the one before cannot hold: the kernel kills a child when the launcher dies (``core.leash``;
not its children's children); a process group takes what a child started in it (not what opened a session of its own);
a marker in the environment, which every descendant inherits, finds the rest.
"""

from __future__ import annotations

import contextlib
import os
import time

import psutil

MARKER = "ROLLSTREAM_PROCESS"
"""Environment variable ``<launch id>/<component>`` that every descendant of a component carries."""


def marked(prefix: str) -> list[psutil.Process]:
    """Living processes whose marker is ``prefix`` or below it (``prefix/…``)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            value = process.environ().get(MARKER, "")
            alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if alive and (value == prefix or value.startswith(prefix + "/")):
                found.append(process)
    return found


def kill_marked(prefix: str, deadline: float = 10.0) -> int:
    """SIGKILL all that carry the marker until none is left or ``deadline`` seconds passed; returns how many were."""
    killed: set[int] = set()
    end = time.monotonic() + deadline
    while (left := marked(prefix)) and time.monotonic() < end:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
                killed.add(process.pid)
        psutil.wait_procs(left, timeout=0.5)
    return len(killed)


def signal_group(pid: int, signum: int) -> None:
    """Signal a process group that may be gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
