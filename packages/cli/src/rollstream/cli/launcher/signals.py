"""Ctrl-C once: an orderly stop. Twice: at once."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """Lifecycle: ``with``. ``asked`` is set by the first signal; each later one calls ``at_once``."""

    def __init__(self, at_once: Callable[[], None]) -> None:
        self.asked = asyncio.Event()
        self.signal: signal.Signals | None = None
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> StopSignals:
        for signum in SIGNALS:
            self._loop.add_signal_handler(signum, self._received, signum)
        return self

    def __exit__(self, *_: object) -> None:
        for signum in SIGNALS:
            self._loop.remove_signal_handler(signum)

    def _received(self, signum: signal.Signals) -> None:
        if self.asked.is_set():
            self._at_once()
        self.signal = self.signal or signum
        self.asked.set()
