"""A small real HTTP replica for router tests: asyncio streams, registered in the registry like an engine."""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from dataclasses import dataclass, field

from rollstream.core.store import Lease, Store


@dataclass
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class RawReplica:
    """Answers by the path's or header's wish; lives until ``stop``.

    Lifecycle: ``start`` binds and registers, a task renews the lease; ``stop`` drops both; ``kill`` closes the sockets
    and leaves the lease, as a crash does. Header ``X-Do`` picks the behaviour: ``sse:<n>`` (paced chunks), ``hang``,
    ``reset`` (no byte), ``half`` (head and a part, then reset), ``status:<code>``, ``flood:<MiB>``.
    """

    store: Store
    id: str
    version: int = 0
    timeline: int = 0
    state: str = "ready"
    ttl: float = 2.0
    requests: list[Seen] = field(default_factory=list)
    open: int = 0
    flooded: int = 0
    hung_up: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)
    default: str = ""

    async def start(self) -> RawReplica:
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        await self.beat()
        self._beats = asyncio.create_task(self._beat_forever())
        return self

    def lease(self) -> Lease:
        return Lease(
            id=self.id,
            role="inference",
            address=f"http://127.0.0.1:{self.port}",
            state=self.state,
            timeline=self.timeline,
            version=self.version,
            pid=os.getpid(),
        )

    async def beat(self) -> None:
        await self.store.registry.put(self.lease(), self.ttl)

    async def _beat_forever(self) -> None:
        while True:
            await asyncio.sleep(0.2)
            with suppress(Exception):  # Redis is killed on purpose
                await asyncio.wait_for(self.beat(), 1)

    async def kill(self) -> None:
        """Dies as by ``kill -9``: connections reset, lease left behind."""
        self._beats.cancel()
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def stop(self) -> None:
        await self.kill()
        with suppress(Exception):
            await asyncio.wait_for(self.store.registry.drop("inference", self.id), 1)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                seen = await self._read(reader)
                self.requests.append(seen)
                self.open += 1
                try:
                    await self._answer(seen, reader, writer)
                finally:
                    self.open -= 1
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> Seen:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        return Seen(method, path, headers, body)

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        do, _, argument = seen.headers.get("x-do", self.default).partition(":")
        if do == "sse":
            await self._stream(int(argument), writer)
        elif do == "reset":
            writer.transport.abort()
            raise ConnectionResetError
        elif do == "half":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
            await writer.drain()
            await asyncio.sleep(0.1)
            writer.transport.abort()
            raise ConnectionResetError
        elif do == "hang":
            await self._hang(reader)
            self._plain(writer, 200, seen)
        elif do == "flood":
            await self._flood(int(argument), writer)
        elif do == "status":
            self._plain(writer, int(argument), seen)
        else:
            self._plain(writer, 200, seen)

    async def _hang(self, reader: asyncio.StreamReader) -> None:
        """Waits for ``release``, or notices that the router has hung up, as an engine does."""
        released = asyncio.ensure_future(self.release.wait())
        gone = asyncio.ensure_future(reader.read(1))
        done, pending = await asyncio.wait({released, gone}, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        if gone in done:
            self.hung_up += 1
            raise ConnectionResetError

    async def _flood(self, mebibytes: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (mebibytes << 20))
        for _ in range(mebibytes):
            writer.write(bytes(1 << 20))
            await writer.drain()
            self.flooded += 1

    async def _stream(self, count: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for n in range(count):
            event = b"data: %d\n\n" % n
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0.03)
        writer.write(b"0\r\n\r\n")

    def _plain(self, writer: asyncio.StreamWriter, status: int, seen: Seen) -> None:
        body = json.dumps({"replica": self.id, "path": seen.path, "size": len(seen.body)}).encode()
        length = len(body)
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode() + (b"" if seen.method == "HEAD" else body))
