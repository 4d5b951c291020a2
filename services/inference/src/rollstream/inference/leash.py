"""No orphan: a process can ask the kernel to be killed when its parent dies."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Loaded here, so that nothing is imported between fork and exec when :func:`hold` runs as a preexec_fn.
_libc = ctypes.CDLL(None, use_errno=True)


def hold(signum: int = signal.SIGKILL) -> None:
    """Send this process ``signum`` when the thread that started it ends. Survives exec, not fork.

    Linux only; raises ``OSError`` where prctl is refused.
    """
    if _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")


def hold_to(parent: int) -> None:
    """Like :func:`hold`, and exit at once when ``parent`` has already gone (it died before the call)."""
    hold()
    if os.getppid() != parent:
        os._exit(1)
