"""The fleet as the router sees it: ready replicas from the registry, kept when Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rollstream.core.store import Lease


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that takes requests. ``since`` is the view's generation in which it (last) became ready."""

    id: str
    host: str
    port: int
    timeline: int
    version: int
    since: int
    lease: Lease

    @property
    def policy(self) -> tuple[int, int]:
        """(timeline, version) of its weights."""
        return self.timeline, self.version


@dataclass(frozen=True, slots=True)
class View:
    """One look at the registry. Immutable; a new generation replaces it."""

    generation: int = 0
    ready: Mapping[str, Replica] = field(default_factory=dict)
    leases: tuple[Lease, ...] = ()
    """Every replica with a lease, whatever its state."""


def parse_address(address: str) -> tuple[str, int] | None:
    """(host, port) of "http://host:port", or None when it is not one."""
    try:
        parts = urlsplit(address)
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    return None


def next_view(previous: View, leases: Iterable[Lease]) -> View:
    """The view after a look at the registry: a replica that stayed ready at its address keeps its ``since``."""
    leases = tuple(leases)
    generation = previous.generation + 1
    ready: dict[str, Replica] = {}
    for lease in leases:
        address = parse_address(lease.address)
        if lease.state != "ready" or address is None:
            continue
        before = previous.ready.get(lease.id)
        same = before is not None and (before.host, before.port) == address and before.lease.pid == lease.pid
        since = before.since if before is not None and same else generation
        ready[lease.id] = Replica(lease.id, *address, lease.timeline, lease.version, since, lease)
    return View(generation, ready, leases)


class Fleet:
    """Holds the current view and lets requests wait for a better one.

    Invariant: ``view`` changes only through ``look``, between two awaits, so that a request sees one whole view.
    """

    def __init__(self) -> None:
        self.view = View()
        self._changed = asyncio.Event()

    def look(self, leases: Iterable[Lease]) -> None:
        """Takes what the registry says now."""
        self.view = next_view(self.view, leases)
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, deadline: float) -> bool:
        """Waits for the next look; False when ``deadline`` (loop time) came first."""
        event = self._changed
        try:
            async with asyncio.timeout_at(deadline):
                await event.wait()
        except TimeoutError:
            return False
        return True
