"""The router's HTTP/1.1 server on a real socket: what it makes of every way to send a request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rollstream.router.http_server import ClientConnection, Server
from rollstream.router.limits import Limits
from rollstream.router.requests import Request


class Echo:
    """Answers what it saw; ``/slow`` waits until it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.cancelled = 0
        self.started = 0

    async def __call__(self, request: Request, client: ClientConnection) -> None:
        self.started += 1
        if request.path == b"/slow":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if request.path == b"/boom":
            raise RuntimeError("boom")
        body = b"".join(request.body)
        seen = {
            "method": request.method.decode(),
            "path": request.path.decode(),
            "body": body[:100].decode("latin-1"),
            "size": len(body),
            "head": request.forwarded_head().decode("latin-1"),
        }
        client.reply(200, json.dumps(seen).encode())


class Running:
    def __init__(self, server: Server, echo: Echo, port: int) -> None:
        self.server = server
        self.echo = echo
        self.port = port

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def raw(self, data: bytes) -> bytes:
        """Everything that the server answers until it closes."""
        reader, writer = await self.open()
        writer.write(data)
        received = await asyncio.wait_for(reader.read(), 5)
        writer.close()
        return received


@asynccontextmanager
async def running(limits: Limits | None = None) -> AsyncIterator[Running]:
    echo = Echo()
    server = Server(echo, limits or Limits(), lambda status: None)
    port = await server.start("127.0.0.1", 0)

    async def sweep() -> None:
        while True:
            await asyncio.sleep(server.limits.sweep_seconds)
            server.sweep(server.loop.time())

    sweeper = asyncio.create_task(sweep())
    try:
        yield Running(server, echo, port)
    finally:
        sweeper.cancel()
        await server.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
    body = await asyncio.wait_for(reader.readexactly(int(headers["content-length"])), 5)
    return int(lines[0].split()[1]), headers, body


def error_of(response: bytes) -> tuple[int, str]:
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"


async def test_keep_alive_serves_many_requests_on_one_connection() -> None:
    async with running() as run:
        reader, writer = await run.open()
        for n in range(3):
            writer.write(b"POST /n%d?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\nhi" % n)
            status, headers, body = await answer_of(reader)
            assert (status, json.loads(body)["path"], json.loads(body)["body"]) == (200, f"/n{n}", "hi")
            assert "connection" not in headers
        writer.close()


async def test_one_byte_at_a_time() -> None:
    async with running() as run:
        reader, writer = await run.open()
        for byte in b"POST /slowly HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        _, _, body = await answer_of(reader)
        assert json.loads(body)["body"] == "hello"
        writer.close()


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(
            b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
            + GET
            + b"POST /b HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nab"
        )
        await asyncio.sleep(0.05)
        assert run.echo.started == 1, "one at a time"
        run.echo.release.set()
        writer.write(b"c")
        paths = [json.loads((await answer_of(reader))[2]) for _ in range(3)]
        assert [p["path"] for p in paths] == ["/slow", "/a", "/b"]
        assert paths[2]["body"] == "abc"
        writer.close()


async def test_many_pipelined_in_one_packet() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(GET * 500)
        for _ in range(500):
            assert (await answer_of(reader))[0] == 200
        writer.close()


async def test_refusal_after_pipelined_requests_comes_last() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\nNONSENSE\r\n\r\n")
        await asyncio.sleep(0.05)
        run.echo.release.set()
        assert (await answer_of(reader))[0] == 200
        assert (await answer_of(reader))[0] == 400
        assert await reader.read() == b""
        writer.close()


async def test_chunked_body_is_joined_and_its_length_stated() -> None:
    async with running() as run:
        data = b"POST /c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        data += b"3\r\nabc\r\n2;ext=1\r\nde\r\n0\r\nT: r\r\n\r\n"
        reader, writer = await run.open()
        for piece in (data[:70], data[70:75], data[75:]):
            writer.write(piece)
            await asyncio.sleep(0.01)
        _, _, body = await answer_of(reader)
        seen = json.loads(body)
        assert seen["body"] == "abcde"
        assert "content-length: 5" in seen["head"]
        assert "transfer-encoding" not in seen["head"].lower()
        assert "T: r" not in seen["head"]
        writer.close()


async def test_expect_100_continue() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(b"POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        status, _, body = await answer_of(reader)
        assert (status, json.loads(body)["body"]) == (200, "ok")
        assert "expect" not in json.loads(body)["head"].lower()
        writer.close()


async def test_expect_behind_a_running_request_waits_its_turn() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        writer.write(b"POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await asyncio.sleep(0.05)
        run.echo.release.set()
        assert (await answer_of(reader))[0] == 200
        assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5) == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await answer_of(reader))[0] == 200
        writer.close()


async def test_expect_of_a_body_too_large_is_refused_before_it_is_sent() -> None:
    async with running(Limits(body_bytes=10)) as run:
        received = await run.raw(b"POST /e HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 11\r\n\r\n")
        assert error_of(received) == (413, "body_too_large")


async def test_head_states_the_length_and_sends_no_body() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(b"HEAD /h HTTP/1.1\r\nHost: x\r\n\r\n" + GET)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert b"content-length: " in head
        status, _, body = await answer_of(reader)
        assert (status, json.loads(body)["path"]) == (200, "/a"), "the next answer follows at once"
        writer.close()


async def test_hop_by_hop_headers_are_not_forwarded() -> None:
    async with running() as run:
        received = await run.raw(
            b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: close, X-Secret\r\nX-Secret: 1\r\n"
            b"Keep-Alive: 5\r\nTE: trailers\r\nProxy-Authorization: p\r\nX-Kept: yes\r\nAuthorization: Bearer t\r\n\r\n"
        )
        forwarded = json.loads(received.partition(b"\r\n\r\n")[2])["head"].lower()
        assert forwarded == "get /a http/1.1\r\nhost: x\r\nx-kept: yes\r\nauthorization: bearer t\r\n\r\n"
        assert b"connection: close" in received


async def test_absolute_target_becomes_origin_form() -> None:
    async with running() as run:
        received = await run.raw(b"GET http://other/v1/models?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        seen = json.loads(received.partition(b"\r\n\r\n")[2])
        assert seen["path"] == "/v1/models"
        assert seen["head"].startswith("GET /v1/models?a=b HTTP/1.1\r\n")


async def test_http_1_0_closes() -> None:
    async with running() as run:
        received = await run.raw(b"GET /a HTTP/1.0\r\nConnection: keep-alive\r\n\r\n")
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert b"connection: close" in received


async def test_upgrade_is_ignored_and_the_request_served() -> None:
    async with running() as run:
        received = await run.raw(
            b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\n"
            b"Upgrade: h2c\r\nHTTP2-Settings: AA\r\n\r\n"
        )
        assert received.startswith(b"HTTP/1.1 200 OK")
        assert "upgrade" not in json.loads(received.partition(b"\r\n\r\n")[2])["head"].lower()


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GARBAGE\r\n\r\n", 400, "malformed_http"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "malformed_http"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, None),
        (b"GET /a HTTP/1.1\r\n\r\n", 400, "missing_host"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", 400, "duplicate_host"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\n folded\r\n\r\n", 400, "malformed_http"),
        (b"GET /a HTTP/1.1\nHost: x\n\n", 400, "malformed_http"),
        (
            b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "malformed_http",
        ),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n", 400, "malformed_http"),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, "malformed_http"),
        (
            b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
            501,
            "unsupported_transfer_encoding",
        ),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n", 400, "malformed_http"),
        (b"POST /a HTTP/1.1\r\nHost: x\r\nExpect: teapot\r\nContent-Length: 2\r\n\r\n", 417, "expectation_failed"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX-Session-ID: " + b"s" * 300 + b"\r\n\r\n", 400, "bad_session_id"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\nX: " + b"h" * 70_000 + b"\r\n\r\n", 431, "head_too_large"),
        (b"GET /" + b"u" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "head_too_large"),
        (b"GET /" + b"u" * 70_000, 431, "head_too_large"),
        (b"GET /a HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000, 431, "head_too_large"),
    ],
)
async def test_bad_requests_are_refused_with_a_reason(data: bytes, status: int, code: str | None) -> None:
    async with running() as run:
        received = await run.raw(data)
        assert b"connection: close" in received
        got_status, got_code = error_of(received)
        assert got_status == status
        assert code is None or got_code == code
        assert run.echo.started == 0
        assert b"HTTP/1.1 200" in await run.raw(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")), (
            "still serving"
        )


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_too_large_is_refused_although_the_client_keeps_sending(chunked: bool) -> None:
    async with running(Limits(body_bytes=100_000)) as run:
        reader, writer = await run.open()
        if chunked:
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        else:
            writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n")
        for _ in range(40):
            writer.write(b"186a0\r\n" + b"x" * 100_000 + b"\r\n" if chunked else b"x" * 100_000)
        assert (await answer_of(reader))[0] == 413
        assert run.echo.started == 0
        writer.close()


async def test_body_of_exactly_the_limit_passes() -> None:
    async with running(Limits(body_bytes=100_000)) as run:
        reader, writer = await run.open()
        writer.write(b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)
        _, _, body = await answer_of(reader)
        assert json.loads(body)["size"] == 100_000
        writer.close()


FAST = replace(Limits(), head_seconds=0.2, body_seconds=0.2, idle_seconds=0.2, stall_seconds=0.3)


async def test_slow_head_and_slow_body_get_408() -> None:
    async with running(FAST) as run:
        assert error_of(await run.raw(b"GET /a HTTP/1.1\r\nHos")) == (408, "request_timeout")
        slow_body = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nab"
        assert error_of(await run.raw(slow_body)) == (408, "request_timeout")


async def test_silent_and_idle_connections_are_closed_without_a_word() -> None:
    async with running(FAST) as run:
        assert await run.raw(b"") == b""
        assert (await run.raw(GET)).count(b"HTTP/1.1 200 OK") == 1


async def test_a_client_that_leaves_cancels_its_request() -> None:
    async with running() as run:
        _, writer = await run.open()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        assert run.echo.started == 1
        writer.close()
        await asyncio.sleep(0.05)
        assert run.echo.cancelled == 1
        assert not run.server.connections


async def test_a_failing_handler_answers_500_and_the_connection_goes_on() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(b"GET /boom HTTP/1.1\r\nHost: x\r\n\r\n")
        status, _, body = await answer_of(reader)
        assert (status, json.loads(body)["error"]["code"]) == (500, "router_error")
        writer.write(GET)
        assert (await answer_of(reader))[0] == 200
        writer.close()


async def test_drain_answers_what_is_open_and_takes_nothing_new() -> None:
    async with running() as run:
        _, idle = await run.open()
        reader, writer = await run.open()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        draining = asyncio.create_task(run.server.drain(5))
        await asyncio.sleep(0.1)
        with pytest.raises(OSError):
            await run.open()
        run.echo.release.set()
        status, headers, _ = await answer_of(reader)
        assert (status, headers["connection"]) == (200, "close")
        assert await reader.read() == b""
        assert await asyncio.wait_for(draining, 5) == 0
        idle.close()
        writer.close()


async def test_drain_has_a_deadline() -> None:
    async with running() as run:
        reader, writer = await run.open()
        writer.write(b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.05)
        assert await run.server.drain(0.1) == 1
        await run.server.close()
        with pytest.raises(ConnectionError):
            await reader.read()
        assert run.echo.cancelled == 1
        writer.close()
