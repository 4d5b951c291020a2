"""The two ends of an answer on its way through the router."""

from __future__ import annotations

from typing import Protocol


class Source(Protocol):
    """Whatever feeds an answer; it is paused while the client reads too slowly."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Sink(Protocol):
    """Where an answer goes. It is told what feeds it, None when that is over."""

    def write(self, data: bytes) -> None: ...

    def feed_from(self, source: Source | None) -> None: ...
