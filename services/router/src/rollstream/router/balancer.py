"""Picks replicas and accounts for open requests, with Redis when it is there and from the last view when it is not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import structlog

from rollstream.router.affinity import Affinity, AffinityAway
from rollstream.router.choose import Bindings, Wish, least_loaded
from rollstream.router.errors import HTTPError
from rollstream.router.view import Fleet, Replica

log = structlog.get_logger(__name__)

REPORT_SECONDS = 0.01
MAX_UNREPORTED_ENDS = 65_536


@dataclass(slots=True)
class Pick:
    """A replica chosen for one attempt; its load counts until ``Balancer.release``."""

    replica: Replica
    open: bool = True


class Balancer:
    """One per router.

    A request with a session costs one Redis round trip (the script that all routers share). One without a session is
    spread by this router alone: over its own open requests and the other routers' as last seen. Load is published as
    this router's whole count per replica, at most every 10 ms, so that a lost update heals with the next one; what has
    changed since then travels with each session's choice.

    Invariant: ``open`` holds exactly the picks that were not released; Redis follows it.
    """

    def __init__(self, fleet: Fleet, affinity: Affinity, no_replica_timeout: float) -> None:
        self._fleet = fleet
        self._affinity = affinity
        self._no_replica_timeout = no_replica_timeout
        self._loop = asyncio.get_running_loop()
        self.bindings = Bindings()
        self.open: dict[str, int] = {}
        self._others: Mapping[str, int] = {}
        self._turns: dict[str, int] = {}
        self._turn = 0
        self._unreported: dict[str, int] = {}
        self._dirty = asyncio.Event()
        self._ended: deque[str] = deque(maxlen=MAX_UNREPORTED_ENDS)
        self.away = False
        """Whether Redis is away: choices are made from the last view."""

    # --- choosing --------------------------------------------------------------------------------------------------

    async def acquire(self, wish: Wish, deadline: float) -> Pick:
        """A replica for the wish, waited for until ``deadline`` (loop time).

        Raises:
            HTTPError: 503 that says why there is none.
        """
        while True:
            replica = await self._choose(wish)
            if replica is not None:
                self.open[replica.id] = self.open.get(replica.id, 0) + 1
                return Pick(replica)
            if not await self._fleet.changed(deadline):
                why = wish.why_none(self._fleet.view)
                hint = f"Waited {self._no_replica_timeout:g} s (router option no_replica_timeout); see GET /replicas."
                raise HTTPError(503, "no_replica", f"{why} {hint}", headers=((b"retry-after", b"1"),))

    def has_other(self, wish: Wish, but: Replica) -> bool:
        """Whether another replica could take the wish at once."""
        return any(replica.id != but.id for replica in wish.candidates(self._fleet.view))

    async def _choose(self, wish: Wish) -> Replica | None:
        view = self._fleet.view
        candidates = wish.candidates(view)
        if not candidates:
            return None
        session = wish.session
        if session is None:
            return self._spread(candidates)
        if not self.away:
            try:
                exclude = view.ready.keys() - {replica.id for replica in candidates}
                changes, self._unreported = self._unreported, {}
                try:
                    chosen = await self._affinity.choose(session, exclude, self.bindings.get(session), changes)
                finally:
                    self._dirty.set()  # the count in Redis may be another than ours: a cancelled call, a race
            except AffinityAway as error:
                self.lost(error)
            else:
                # None, or one that came after our last look: the next look brings it.
                replica = self._fleet.view.ready.get(chosen) if chosen is not None else None
                if replica is None or not wish.admits(replica):
                    if chosen is not None:
                        self._changed(chosen, -1)  # takes back what the script has counted
                    return None
                self.bindings.bind(session, replica.id)
                return replica
        bound = self.bindings.get(session)
        for replica in candidates:
            if replica.id == bound:
                return replica
        replica = self._spread(candidates)
        self.bindings.bind(session, replica.id)
        return replica

    def _spread(self, candidates: list[Replica]) -> Replica:
        loads = {r.id: self.open.get(r.id, 0) + self._others.get(r.id, 0) for r in candidates}
        replica = least_loaded(candidates, loads, self._turns)
        self._turn += 1
        self._turns[replica.id] = self._turn
        self._changed(replica.id, 1)
        return replica

    def _changed(self, replica: str, by: int) -> None:
        self._unreported[replica] = self._unreported.get(replica, 0) + by
        self._dirty.set()

    def release(self, pick: Pick) -> None:
        """Ends an attempt, once; never waits, so that it holds under cancellation."""
        if not pick.open:
            return
        pick.open = False
        left = self.open[pick.replica.id] - 1
        if left:
            self.open[pick.replica.id] = left
        else:
            del self.open[pick.replica.id]
        self._changed(pick.replica.id, -1)

    async def finish(self, session: str) -> None:
        """Forgets a session; when Redis is away, it is told on its return."""
        self.bindings.forget(session)
        if not self.away:
            try:
                await self._affinity.finish(session)
                return
            except AffinityAway as error:
                self.lost(error)
        self._ended.append(session)

    # --- keeping Redis in step -------------------------------------------------------------------------------------

    def lost(self, error: AffinityAway) -> None:
        """Redis does not answer."""
        if not self.away:
            self.away = True
            log.warning("Redis is away; routing from the last view of the fleet", reason=str(error))

    def found(self, others: Mapping[str, int]) -> None:
        """Redis has answered a look; ``others`` are the open requests of the other routers."""
        self._others = others
        if self.away:
            self.away = False
            log.info("Redis is back; load and sessions are reported again")
            self._dirty.set()

    async def report_forever(self) -> None:
        """Owned task: publishes the load whenever it has changed, and the sessions that ended while Redis was away."""
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            if not self.away:
                await self._report()
            await asyncio.sleep(REPORT_SECONDS)

    def refresh_load(self) -> None:
        """Marks the load for publication although it has not changed: after a wipe Redis knows nothing."""
        self._dirty.set()

    async def _report(self) -> None:
        self._unreported = {}
        try:
            await self._affinity.report(dict(self.open))
            while self._ended:
                await self._affinity.finish(self._ended[0])
                self._ended.popleft()
        except AffinityAway as error:
            self.lost(error)
