"""One request to a replica and its answer back: choose, forward, retry before the first byte, account in `finally`."""

from __future__ import annotations

import asyncio

import structlog

from rollstream.router.balancer import Balancer, Pick
from rollstream.router.choose import Wish, parse_floor
from rollstream.router.errors import HTTPError
from rollstream.router.http_client import Pool, UpstreamConnection, UpstreamError
from rollstream.router.http_server import ClientConnection
from rollstream.router.metrics import Stats
from rollstream.router.requests import Request
from rollstream.router.view import Fleet, Replica

log = structlog.get_logger(__name__)

REPLICA_HEADER = b"x-rollstream-replica"
DYING = frozenset((502, 503, 504))
"""Statuses of an engine that cannot serve; another replica may."""


class _TryAnother(Exception):
    """This replica cannot answer and nothing was sent to the client yet."""

    def __init__(self, failure: HTTPError) -> None:
        super().__init__(failure.message)
        self.failure = failure


class Proxy:
    """Forwards requests. Stateless: all accounting is the balancer's and the pool's.

    A replica's answer, errors included, passes through untouched. The exception is a failure before its first byte
    reached the client (no connection, a reset, 502, 503 or 504): then another replica is tried, ``retries`` times.
    """

    def __init__(
        self, fleet: Fleet, balancer: Balancer, pool: Pool, stats: Stats, *, retries: int, no_replica_timeout: float
    ) -> None:
        self._fleet = fleet
        self._balancer = balancer
        self._pool = pool
        self._stats = stats
        self._retries = retries
        self._no_replica_timeout = no_replica_timeout
        self._loop = asyncio.get_running_loop()

    async def forward(self, request: Request, client: ClientConnection) -> None:
        """Serves one request.

        Raises:
            HTTPError: no replica could answer.
        """
        wish = Wish(request.session, parse_floor(request.min_version))
        data = [request.forwarded_head(), *request.body]
        deadline = self._loop.time() + self._no_replica_timeout
        failure: HTTPError | None = None
        for attempt in range(self._retries + 1):
            try:
                pick = await self._balancer.acquire(wish, deadline)
            except HTTPError as none_left:
                raise failure or none_left from None
            try:
                await self._attempt(request, client, data, wish, pick, last=attempt == self._retries)
                return
            except _TryAnother as retry:
                failure = retry.failure
                wish.failed[pick.replica.id] = self._fleet.view.generation
                self._stats.retries += 1
            finally:
                self._balancer.release(pick)
        assert failure is not None
        raise failure

    async def _attempt(
        self, request: Request, client: ClientConnection, data: list[bytes], wish: Wish, pick: Pick, *, last: bool
    ) -> None:
        replica = pick.replica
        connection: UpstreamConnection | None = None
        try:
            connection = await self._answer(replica, data, without_body=request.method == b"HEAD")
            if connection.status in DYING and not last and self._balancer.has_other(wish, replica):
                raise _TryAnother(_bad_gateway(replica, f"answered {connection.status}"))
            extra = b"%b: %b\r\n" % (REPLICA_HEADER, replica.id.encode("latin-1", "replace"))
            if not connection.self_delimited:
                client.close_after()
            await connection.relay(client, extra + b"connection: close\r\n" if client.closes else extra)
            self._stats.count(connection.status)
        except UpstreamError as error:
            self._failed(replica, error, client)
        finally:
            if connection is not None:
                self._pool.give(replica.host, replica.port, connection)

    async def _answer(self, replica: Replica, data: list[bytes], *, without_body: bool) -> UpstreamConnection:
        """Sends the request; a kept connection that the replica has just closed is replaced, at no attempt's cost."""
        fresh = False
        while True:
            connection = await self._pool.take(replica.host, replica.port, fresh=fresh)
            try:
                await connection.request(data, without_body=without_body)
            except UpstreamError as error:
                self._pool.give(replica.host, replica.port, connection)
                if error.stale and not fresh:
                    fresh = True
                    continue
                raise
            except BaseException:
                self._pool.give(replica.host, replica.port, connection)
                raise
            return connection

    def _failed(self, replica: Replica, error: UpstreamError, client: ClientConnection) -> None:
        self._stats.upstream_failures += 1
        log.debug("replica failed", replica=replica.id, reason=error.reason, answered=client.started)
        if client.started:
            self._stats.broken_answers += 1
            client.abort()
        elif error.timed_out:
            raise HTTPError(504, "replica_timeout", f"Replica {replica.id} {error.reason}.")
        else:
            raise _TryAnother(_bad_gateway(replica, error.reason)) from error


def _bad_gateway(replica: Replica, reason: str) -> HTTPError:
    return HTTPError(502, "replica_failed", f"Replica {replica.id} {reason}; try again.")
