"""Connections to replicas: a pool of HTTP/1.1 connections whose answers are relayed as the bytes that came."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

from rollstream.router.flow import Sink
from rollstream.router.limits import Limits

# Response headers that belong to the connection with the replica.
_HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"upgrade"))


class UpstreamError(Exception):
    """The replica gave no complete answer. ``reason`` completes the sentence "replica X …"."""

    def __init__(self, reason: str, *, stale: bool = False, timed_out: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.stale = stale
        """A kept-alive connection that the replica closed before it answered anything: nobody's fault."""
        self.timed_out = timed_out


class UpstreamConnection(asyncio.Protocol):
    """One connection to a replica, for one exchange at a time.

    An exchange: ``request`` (resolves when the answer can be judged) → ``relay`` (resolves when all of it went to the
    sink) → ``reusable`` says whether the pool may keep it. Any other end is ``abort``.

    The parser sees every byte and tells where heads and messages end; the bytes themselves go to the sink untouched,
    except that connection headers are left out of the head.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self.idle_since = 0.0
        self.used = False
        self.deadline = math.inf
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None
        self._paused = False
        self._error: UpstreamError | None = None
        self._reset(without_body=False)

    def _reset(self, *, without_body: bool) -> None:
        self._without_body = without_body
        self._head_data = b""
        self._head_done = False
        self._interim = 0
        self._rewrite: list[tuple[bytes, bytes]] = []
        self._has_hop_headers = False
        self._self_delimited = False
        self._streams = False
        self._keep_alive = False
        self._complete = False
        self._overrun = False
        self._pending: list[bytes] = []
        self.status = 0

    # --- exchange --------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the connection is gone or going."""
        return self._transport is None or self._transport.is_closing()

    @property
    def self_delimited(self) -> bool:
        """Whether the answer says itself where it ends; if not, only the end of the connection does."""
        return self._self_delimited or self._without_body

    @property
    def reusable(self) -> bool:
        """Whether the exchange ended cleanly and the replica keeps the connection open."""
        return self._complete and self._keep_alive and not self._without_body and not self.closed

    async def request(self, data: Sequence[bytes], *, without_body: bool) -> int:
        """Sends a request and waits until its answer can be judged: the head is there and, unless the answer streams,
        something of its body. Returns the status.

        Raises:
            UpstreamError: connection lost, malformed answer, or nothing within ``answer_seconds``.
        """
        self._reset(without_body=without_body)
        if self._transport is None or self.closed:
            raise UpstreamError("closed the connection", stale=self.used)
        self.deadline = self._loop.time() + self._limits.answer_seconds
        self._transport.writelines(list(data))
        await self._wait()
        return self.status

    async def relay(self, sink: Sink, extra_headers: bytes) -> None:
        """Writes head and body to ``sink`` as they come; ``extra_headers`` (whole lines) are added to the head.

        Raises:
            UpstreamError: the answer broke off; the sink has got a part of it.
        """
        if self._error is not None:
            raise self._error  # nothing was sent yet
        data = self._head(extra_headers)
        sink.write(data + b"".join(self._pending) if self._pending else data)
        self._pending = []
        if not self._complete:
            self._sink = sink
            sink.feed_from(self)
            try:
                await self._wait()
            finally:
                self._sink = None
                sink.feed_from(None)
                self.resume()
        self.deadline = math.inf
        self.used = True

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _head(self, extra_headers: bytes) -> bytes:
        if not self._has_hop_headers:
            return b"".join((self._head_data[:-2], extra_headers, b"\r\n"))
        parts = [self._head_data[: self._head_data.index(b"\r\n") + 2]]
        for name, value in self._rewrite:
            if name.lower() not in _HOP_BY_HOP:
                parts += (name, b": ", value, b"\r\n")
        return b"".join((*parts, extra_headers, b"\r\n"))

    def abort(self) -> None:
        """Closes at once; the replica notices and cancels what it was doing."""
        self.deadline = math.inf
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self.deadline = math.inf  # the client's stall deadline runs instead
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and self._transport is not None:
            self._paused = False
            self.deadline = self._loop.time() + self._limits.answer_seconds
            self._transport.resume_reading()

    def sweep(self, now: float) -> None:
        """Fails the exchange when its deadline has passed."""
        if now >= self.deadline:
            seconds = self._limits.answer_seconds
            self._fail(UpstreamError(f"sent nothing for {seconds:g} s (router option request_timeout)", timed_out=True))

    # --- transport -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if exc is None and self._head_done and not self._self_delimited and self._error is None:
            self._complete = True  # a body that ends with its connection
            self._wake()
            return
        nothing_came = not self._head_data and not self._head_done
        how = "closed the connection" if exc is None else f"broke the connection ({exc})"
        reason = f"{how} before its answer was complete"
        self._fail(UpstreamError(reason, stale=self.used and nothing_came))

    def data_received(self, data: bytes) -> None:
        if self._waiter is None and (self._complete or not self._head_done):
            self.abort()  # nobody asked for these bytes
            return
        if self._complete and self._without_body:
            return
        self.deadline = self._loop.time() + self._limits.answer_seconds
        streaming = self._head_done
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(UpstreamError(f"sent a malformed answer ({error})"))
            return
        if self._overrun:
            self._fail(UpstreamError("sent more bytes than its answer has"))
            return
        if streaming:
            self._body(data)
        else:
            self._head_data += data
            self._split_head()

    def _split_head(self) -> None:
        while self._interim or self._head_done:
            end = self._head_data.find(b"\r\n\r\n")
            if end < 0:
                self._fail(UpstreamError("sent a malformed answer (no end of head)"))
                return
            head, rest = self._head_data[: end + 4], self._head_data[end + 4 :]
            if self._interim:  # 1xx: the client was told to continue long ago
                self._interim -= 1
                self._head_data = rest
                continue
            self._head_data = head
            if self._without_body:
                self._complete = True
                self._wake()
            else:
                self._body(rest)
            return

    def _body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.write(data)
            if self._complete:
                self._wake()
            return
        if data:
            self._pending.append(data)
        # A plain answer is judged with the first piece of its body: one write to the client, and a replica that dies in
        # between can still be replaced. A streamed one is judged at its head, which clients wait for.
        if data or self._complete or not self._self_delimited or self._streams:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        self._error = self._error or error
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(self._error)
        self.abort()

    # --- parser ----------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._head_done:
            self._overrun = True
        self._rewrite = []
        self._has_hop_headers = self._self_delimited = self._streams = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_done:
            return  # a trailer: forwarded with the bytes it is part of
        self._rewrite.append((name, value))
        lower = name.lower()
        if lower in _HOP_BY_HOP:
            self._has_hop_headers = True
        elif lower == b"content-length":
            self._self_delimited = True
        elif lower == b"transfer-encoding":
            self._self_delimited = self._streams = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._interim += 1
            return
        self.status = status
        self._head_done = True
        self._keep_alive = self._parser.should_keep_alive()
        if status in (204, 304):
            self._self_delimited = True

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True


class Pool:
    """Connections to all replicas, idle ones kept for reuse (the most recently used first)."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._idle: dict[tuple[str, int], deque[UpstreamConnection]] = {}
        self._busy: set[UpstreamConnection] = set()

    async def take(self, host: str, port: int, *, fresh: bool = False) -> UpstreamConnection:
        """An open connection; ``fresh`` refuses a kept one.

        Raises:
            UpstreamError: no connection within ``connect_seconds``.
        """
        idle = self._idle.get((host, port))
        now = self._loop.time()
        while idle and not fresh:
            connection = idle.pop()
            if not connection.closed and now - connection.idle_since < self._limits.pool_idle_seconds:
                self._busy.add(connection)
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                _, connection = await self._loop.create_connection(lambda: UpstreamConnection(self._limits), host, port)
        except TimeoutError:
            raise UpstreamError(f"took no connection within {self._limits.connect_seconds:g} s") from None
        except OSError as error:
            raise UpstreamError(f"refused the connection ({error.strerror or error})") from None
        self._busy.add(connection)
        return connection

    def give(self, host: str, port: int, connection: UpstreamConnection) -> None:
        """Takes a connection back: kept when its exchange ended cleanly, closed otherwise."""
        self._busy.discard(connection)
        if not connection.reusable:
            connection.abort()
            return
        idle = self._idle.setdefault((host, port), deque())
        connection.idle_since = self._loop.time()
        idle.append(connection)
        if len(idle) > self._limits.pool_idle_connections:
            idle.popleft().abort()

    def sweep(self, now: float) -> None:
        """Fails exchanges past their deadline and closes connections that were idle too long."""
        for connection in list(self._busy):
            connection.sweep(now)
        for address, idle in list(self._idle.items()):
            while idle and (idle[0].closed or now - idle[0].idle_since >= self._limits.pool_idle_seconds):
                idle.popleft().abort()
            if not idle:
                del self._idle[address]

    def close(self) -> None:
        """Closes every connection."""
        for connection in (*self._busy, *(c for idle in self._idle.values() for c in idle)):
            connection.abort()
        self._busy.clear()
        self._idle.clear()
