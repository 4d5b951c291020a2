"""The handler of every request: the router's own routes, or the proxy."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from rollstream.router import routes
from rollstream.router.balancer import Balancer
from rollstream.router.errors import HTTPError
from rollstream.router.http_server import ClientConnection
from rollstream.router.metrics import CONTENT_TYPE
from rollstream.router.proxy import Proxy
from rollstream.router.requests import MAX_SESSION_CHARS, Request
from rollstream.router.view import Fleet

log = structlog.get_logger(__name__)


class _FinishSession(msgspec.Struct):
    session_id: str


class App:
    """Dispatches one request. ``draining`` and ``exposition`` are asked when needed."""

    def __init__(
        self,
        fleet: Fleet,
        balancer: Balancer,
        proxy: Proxy,
        *,
        draining: Callable[[], bool],
        exposition: Callable[[], bytes],
        debug: bool,
    ) -> None:
        self._fleet = fleet
        self._balancer = balancer
        self._proxy = proxy
        self._draining = draining
        self._exposition = exposition
        self._debug = debug

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        started = time.perf_counter()
        try:
            if routes.check(request.method, request.path):
                await self._proxy.forward(request, client)
            elif request.path == b"/finish_session":
                await self._finish_session(request, client)
            else:
                self._answer_itself(request.path, client)
        finally:
            if self._debug:
                seconds = round(time.perf_counter() - started, 6)
                path, method = request.path.decode("latin-1"), request.method.decode("latin-1")
                log.debug("request", method=method, path=path, seconds=seconds)

    async def _finish_session(self, request: Request, client: ClientConnection) -> None:
        session = request.session
        if session is None:
            try:
                session = msgspec.json.decode(b"".join(request.body), type=_FinishSession).session_id
            except msgspec.DecodeError as error:
                message = f'Name the session in the X-Session-ID header or as {{"session_id": "..."}}: {error}.'
                raise HTTPError(400, "no_session", message) from None
        if not session or len(session) > MAX_SESSION_CHARS:
            raise HTTPError(400, "bad_session_id", f"A session id has 1 to {MAX_SESSION_CHARS} characters.")
        await self._balancer.finish(session)
        client.reply(200, b'{"released":true}')

    def _answer_itself(self, path: bytes, client: ClientConnection) -> None:
        if path == b"/metrics":
            client.reply(200, self._exposition(), content_type=CONTENT_TYPE)
        elif path == b"/replicas":
            client.reply(200, msgspec.json.encode(self._replicas()))
        elif path == b"/ready":
            ready = len(self._fleet.view.ready)
            if self._draining() or not ready:
                reason = "The router is draining." if self._draining() else "No inference replica is ready."
                raise HTTPError(503, "not_ready", reason)
            client.reply(200, b'{"status":"ready","replicas":%d}' % ready)
        else:
            status = b"draining" if self._draining() else b"ok"
            client.reply(200, b'{"status":"%b"}' % status)

    def _replicas(self) -> dict[str, Any]:
        view = self._fleet.view
        return {
            "generation": view.generation,
            "redis": "away" if self._balancer.away else "ok",
            "replicas": [
                {
                    "id": lease.id,
                    "address": lease.address,
                    "state": lease.state,
                    "timeline": lease.timeline,
                    "version": lease.version,
                    "open": self._balancer.open.get(lease.id, 0),
                    "detail": lease.detail,
                }
                for lease in view.leases
            ],
        }
