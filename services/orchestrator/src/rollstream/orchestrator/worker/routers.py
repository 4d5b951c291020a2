"""The routers that a worker may ask, kept current from the registry."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence


class Routers:
    """Addresses ("http://host:port") of live routers. Routers are stateless, so any of them may serve a session.

    A session asks the same one while the list stands; one that failed is passed over by asking for the next attempt.
    """

    def __init__(self, addresses: Sequence[str] = ()) -> None:
        self._addresses = sorted(addresses)
        self._known = asyncio.Event()
        if addresses:
            self._known.set()

    def replace(self, addresses: Sequence[str]) -> None:
        """What the registry says now."""
        self._addresses = sorted(set(addresses))
        if self._addresses:
            self._known.set()
        else:
            self._known.clear()

    @property
    def empty(self) -> bool:
        return not self._addresses

    async def choose(self, session: str, attempt: int) -> str:
        """The router for ``attempt`` (0, 1, …) of ``session``; waits for one (the caller holds the deadline)."""
        await self._known.wait()
        return self._addresses[(zlib.crc32(session.encode()) + attempt) % len(self._addresses)]
