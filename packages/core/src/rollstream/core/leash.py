"""No orphan: a process asks the kernel to be killed when the one that started it dies. Linux; elsewhere a no-op."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here, so that nothing is imported between fork and exec when `hold_to` runs as a preexec_fn.
_libc = ctypes.CDLL(None, use_errno=True)


def hold() -> None:
    """SIGKILL for this process when the thread that started it ends. Survives exec, is not inherited by children.

    Raises ``OSError`` where prctl is refused.
    """
    if sys.platform.startswith("linux") and _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")


def hold_to(parent: int) -> None:
    """:func:`hold`, and end at once when ``parent`` (a pid) has already gone: it may have died before this call."""
    hold()
    if os.getppid() != parent:
        os._exit(1)
