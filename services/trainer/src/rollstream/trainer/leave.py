"""Leaving a process that has a compute thread."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def end(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and exit at once with its code: a thread that waits in a collective for a dead rank must not hold
    this process. An exception is printed in full and becomes exit code 1."""
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
