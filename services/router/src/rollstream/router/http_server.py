"""The router's HTTP/1.1 server: connections that parse requests with httptools and hand them to one handler."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

import httptools
import structlog

from rollstream.router.errors import JSON, HeaderPairs, HTTPError, answer
from rollstream.router.flow import Source
from rollstream.router.limits import Limits
from rollstream.router.requests import Request

log = structlog.get_logger(__name__)

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, zero seconds


class Phase(enum.Enum):
    """What a connection is waiting for; each phase but SERVING has a deadline of the limits."""

    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    SERVING = "serving"
    LINGERING = "lingering"


class ClientConnection(asyncio.Protocol):
    """One client. Serves its requests in order, one at a time; pipelined ones wait in a queue.

    Reading goes on while a request is served, so that a client that leaves is noticed at once: its handler is
    cancelled. It pauses only when a further request is already waiting. A refused request is its connection's last.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._parsing: Request | None = None
        self._in_body = False
        self._waiting: deque[Request] = deque()
        self._serving: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._refusal: HTTPError | None = None
        self._deaf = False  # nothing more is read: the last request has come, or it was refused
        self._reading = True
        self._head_fed = 0
        self._phase = Phase.HEAD
        self._deadline = math.inf
        self.started = False
        """Whether a byte of the answer to the current request has been written."""
        self._broken = False
        self._source: Source | None = None
        self._writable = True

    # --- transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._deadline = self._loop.time() + self._limits.head_seconds
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._waiting.clear()
        self._server.connections.discard(self)
        if self._task is not None:
            self._task.cancel()

    def pause_writing(self) -> None:
        self._writable = False
        if self._phase is Phase.SERVING:
            self._deadline = self._loop.time() + self._limits.stall_seconds
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self._writable = True
        if self._phase is Phase.SERVING:
            self._deadline = math.inf
        if self._source is not None:
            self._source.resume()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._phase is Phase.IDLE:
            self._enter(Phase.HEAD, self._limits.head_seconds)
        elif self._phase is Phase.BODY:
            self._deadline = self._loop.time() + self._limits.body_seconds
        if not self._in_body:
            self._head_fed += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # We speak HTTP/1.1 only, as a server may: the request is served, then the connection closes.
            self._deaf = True
        except httptools.HttpParserCallbackError:
            log.exception("the request parser's callback failed")
            self._refuse(HTTPError(500, "router_error", "The router failed on this request; see its log."))
        except httptools.HttpParserError as error:
            if not self._deaf:
                self._refuse(HTTPError(400, "malformed_http", f"This is not an HTTP/1.1 request: {error}."))
        if not self._in_body and self._parsing is not None and self._head_fed > self._limits.head_bytes:
            self._refuse(self._head_too_large())
        if self._waiting and self._serving is not None:
            self._pause_reading()

    # --- parser ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._parsing = None if self._deaf else Request()

    def on_url(self, url: bytes) -> None:
        request = self._parsing
        if request is not None:
            request.target += url
            request.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._parsing
        if request is None or self._in_body:  # refused, or a trailer
            return
        error = request.add_header(name, value)
        if error is None and request.head_bytes > self._limits.head_bytes:
            error = self._head_too_large()
        if error is not None:
            self._refuse(error)

    def on_headers_complete(self) -> None:
        self._in_body = True
        self._head_fed = 0
        request = self._parsing
        if request is None:
            return
        request.method = self._parser.get_method()
        request.http_version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive() and request.http_version == "1.1"
        if self._parser.should_upgrade():
            request.keep_alive = False
        if request.http_version not in ("1.1", "1.0"):
            self._refuse(HTTPError(400, "http_version", "Only HTTP/1.1 and HTTP/1.0 are understood."))
        elif not request.has_host and request.http_version == "1.1":
            self._refuse(HTTPError(400, "missing_host", "An HTTP/1.1 request needs a Host header."))
        elif request.length is not None and request.length > self._limits.body_bytes:
            self._refuse(self._body_too_large())
        elif self._serving is None:
            self._enter(Phase.BODY, self._limits.body_seconds)
            self._send_continue(request)

    def on_body(self, data: bytes) -> None:
        request = self._parsing
        if request is None:
            return
        request.size += len(data)
        if request.size > self._limits.body_bytes:
            self._refuse(self._body_too_large())
        else:
            request.body.append(data)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._head_fed = 0
        request, self._parsing = self._parsing, None
        if request is None:
            return
        if not request.keep_alive:
            self._deaf = True
        self._waiting.append(request)
        if self._serving is None:
            self._serve_next()

    # --- serving ---------------------------------------------------------------------------------------------------

    def _serve_next(self) -> None:
        request = self._waiting.popleft()
        self._serving = request
        self.started = False
        self._phase = Phase.SERVING
        self._deadline = math.inf if self._writable else self._loop.time() + self._limits.stall_seconds
        self._task = self._loop.create_task(self._serve(request))

    async def _serve(self, request: Request) -> None:
        """Runs the handler; whatever it raises becomes an answer, or breaks off the one that has begun."""
        try:
            await self._server.handle(request, self)
        except HTTPError as error:
            self._answer_error(error)
        except Exception:
            log.exception("request failed inside the router", method=request.method, target=request.target)
            self._answer_error(HTTPError(500, "router_error", "The router failed on this request; see its log."))
        finally:
            self._served(request)

    def _answer_error(self, error: HTTPError) -> None:
        if self.started:
            self.abort()
        else:
            self.reply(error.status, error.body(), headers=error.headers)

    def _served(self, request: Request) -> None:
        self._serving = self._task = self._source = None
        transport = self._transport
        if transport is None:
            return
        if self._broken or transport.is_closing():
            transport.abort()
        elif not request.keep_alive or self._server.draining:
            transport.close()  # after what is still buffered
            self._enter(Phase.LINGERING, self._limits.stall_seconds)
        elif self._waiting:
            self._serve_next()
        elif self._refusal is not None:
            self._send_refusal(self._refusal)
        else:
            self._resume_reading()
            if self._parsing is None:
                self._enter(Phase.IDLE, self._limits.idle_seconds)
            elif self._in_body:
                self._enter(Phase.BODY, self._limits.body_seconds)
                self._send_continue(self._parsing)
            else:
                self._enter(Phase.HEAD, self._limits.head_seconds)

    @property
    def closes(self) -> bool:
        """Whether this connection closes after the current answer, which must then say so."""
        return self._serving is None or not self._serving.keep_alive or self._server.draining

    def reply(self, status: int, body: bytes, *, content_type: bytes = JSON, headers: HeaderPairs = ()) -> None:
        """Writes a whole answer of the router's own."""
        head_only = self._serving is not None and self._serving.method == b"HEAD"
        data = answer(
            status, body, content_type=content_type, headers=headers, close=self.closes, without_body=head_only
        )
        self._server.count_reply(status)
        self.write(data)

    def write(self, data: bytes) -> None:
        """Writes bytes of the current answer."""
        self.started = True
        if self._transport is not None:
            self._transport.write(data)

    def feed_from(self, source: Source | None) -> None:
        """Names what feeds the answer; it is paused and resumed with the client."""
        self._source = source
        if source is not None and not self._writable:
            source.pause()

    def close_after(self) -> None:
        """Makes the current answer the connection's last: its end is the end of the connection."""
        if self._serving is not None:
            self._serving.keep_alive = False

    def abort(self) -> None:
        """Breaks the answer off so that the client cannot take it for a complete one."""
        self._broken = True
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None:
                with contextlib.suppress(OSError):  # a reset, not an end that could pass for the body's
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._transport.abort()

    # --- refusals, deadlines ---------------------------------------------------------------------------------------

    def _refuse(self, error: HTTPError) -> None:
        """Ends the connection with ``error``, after the answers that are owed before it."""
        if self._refusal is not None:
            return
        self._refusal = error
        self._parsing = None
        self._deaf = True
        if self._serving is None and not self._waiting:
            self._send_refusal(error)

    def _send_refusal(self, error: HTTPError) -> None:
        transport = self._transport
        if transport is None:
            return
        self._resume_reading()
        self._server.count_reply(error.status)
        transport.write(answer(error.status, error.body(), headers=error.headers, close=True))
        # Closing at once would send a reset while the client still writes, and it would never see the reason.
        if transport.can_write_eof():
            transport.write_eof()
        self._enter(Phase.LINGERING, self._limits.linger_seconds)

    def _head_too_large(self) -> HTTPError:
        return HTTPError(431, "head_too_large", f"The request's head is larger than {self._limits.head_bytes} bytes.")

    def _body_too_large(self) -> HTTPError:
        limit = self._limits.body_bytes
        return HTTPError(413, "body_too_large", f"The body is over {limit} bytes (router option max_body_bytes).")

    def _send_continue(self, request: Request) -> None:
        if request.expects_continue and request.http_version == "1.1" and self._transport is not None:
            request.expects_continue = False
            self._transport.write(CONTINUE)

    def _enter(self, phase: Phase, seconds: float) -> None:
        self._phase = phase
        self._deadline = self._loop.time() + seconds

    def _pause_reading(self) -> None:
        if self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def _resume_reading(self) -> None:
        if not self._reading and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Acts when a deadline has passed."""
        if now < self._deadline or self._transport is None:
            return
        if self._phase in (Phase.SERVING, Phase.LINGERING) or not self._writable:
            self.abort()  # the client does not read its answer, or does not go
        elif self._phase is Phase.IDLE or (self._phase is Phase.HEAD and self._head_fed == 0):
            self._transport.close()
        else:
            self._refuse(HTTPError(408, "request_timeout", f"The request's {self._phase.value} came too slowly."))

    def drain(self) -> None:
        """Closes now when no request is being served or read."""
        if self._transport is not None and self._serving is None and self._parsing is None:
            self._transport.close()


Handler = Callable[[Request, ClientConnection], Coroutine[Any, Any, None]]


class Server:
    """Listens, owns the connections, and drains them.

    Lifecycle: ``start`` → serving → ``drain`` (no new connection, each answer the last of its connection) → ``close``.
    """

    def __init__(self, handle: Handler, limits: Limits, count_reply: Callable[[int], None]) -> None:
        self.handle = handle
        self.limits = limits
        self.count_reply = count_reply
        self.loop = asyncio.get_running_loop()
        self.connections: set[ClientConnection] = set()
        self.draining = False
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Binds and returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        self._server = await self.loop.create_server(lambda: ClientConnection(self), host, port, backlog=4096)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def sweep(self, now: float) -> None:
        """Looks at every connection's deadline."""
        for connection in list(self.connections):
            connection.sweep(now)

    async def drain(self, seconds: float) -> int:
        """Stops listening and waits for the open requests; returns how many were still open after ``seconds``."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        deadline = self.loop.time() + seconds
        while self.connections and self.loop.time() < deadline:
            for connection in list(self.connections):
                connection.drain()
            await asyncio.sleep(0.02)
        return len(self.connections)

    async def close(self) -> None:
        """Breaks off what is left."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()
        while self.connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
