"""No orphan: a process asks the kernel to be killed when its parent dies (Linux only; elsewhere nothing happens)."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def hold_to_parent() -> None:
    """Die with the process that started this one, also when it was killed before this call."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if parent == 1 or os.getppid() != parent:
        os._exit(1)
