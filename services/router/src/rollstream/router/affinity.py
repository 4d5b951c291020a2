"""Redis as the router uses it: every call bounded in time, every kind of outage one exception."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Set
from typing import TypeVar

from redis.exceptions import RedisError

from rollstream.core.store import Lease, Store

ANSWER_SECONDS = 1.0
T = TypeVar("T")


class AffinityAway(Exception):
    """Redis did not answer in time, or not usefully."""


class Affinity:
    """The store's calls on behalf of one router. Stateless.

    Raises ``AffinityAway`` from every method when Redis gives no answer within a second.
    """

    def __init__(self, store: Store, router_id: str, session_ttl: float, lease_seconds: float) -> None:
        self._store = store
        self._router_id = router_id
        self._session_ttl = session_ttl
        self._lease_seconds = lease_seconds

    async def choose(
        self, session: str, exclude: Set[str], preferred: str | None, changes: Mapping[str, int]
    ) -> str | None:
        """Replica id by the script that all routers share; None when it sees no ready one outside ``exclude``."""
        choice = await _bounded(
            self._store.sessions.choose(
                session,
                router=self._router_id,
                ttl=self._session_ttl,
                load_ttl=self._lease_seconds,
                exclude=exclude,
                preferred=preferred,
                changes=changes,
            )
        )
        return choice.replica if choice is not None else None

    async def finish(self, session: str) -> None:
        """Forgets the session."""
        await _bounded(self._store.sessions.finish(session))

    async def report(self, open: Mapping[str, int]) -> None:
        """Publishes this router's open requests per replica; they vanish with its lease."""
        await _bounded(self._store.sessions.report(self._router_id, open, ttl=self._lease_seconds))

    async def replicas(self) -> list[Lease]:
        """Every replica with a lease."""
        return await _bounded(self._store.registry.list("inference"))

    async def others(self) -> Mapping[str, int]:
        """Open requests per replica of all other routers."""
        return await _bounded(self._store.sessions.loads(but=self._router_id))

    async def keep_lease(self, lease: Lease) -> None:
        """Renews this router's own lease."""
        await _bounded(self._store.registry.put(lease, self._lease_seconds))

    async def drop_lease(self) -> None:
        """Ends this router's own lease."""
        await _bounded(self._store.registry.drop("router", self._router_id))


async def _bounded(call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            return await call
    except TimeoutError:
        raise AffinityAway(f"no answer within {ANSWER_SECONDS:g} s") from None
    except (RedisError, OSError) as error:
        raise AffinityAway(f"{type(error).__name__}: {error}") from error
