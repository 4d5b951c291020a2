"""Connections to replicas, against raw servers on real sockets: framing, reuse, faults, back-pressure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from rollstream.router.flow import Source
from rollstream.router.http_client import Pool, UpstreamConnection, UpstreamError
from rollstream.router.limits import Limits

GET = [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Collected:
    """A sink that keeps the pieces as they came."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.source: Source | None = None

    def write(self, data: bytes) -> None:
        self.pieces.append(data)

    def feed_from(self, source: Source | None) -> None:
        self.source = source

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)


@asynccontextmanager
async def upstream(serve: Serve, limits: Limits | None = None) -> AsyncIterator[tuple[Pool, int]]:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    pool = Pool(limits or Limits())

    async def sweep() -> None:
        while True:
            await asyncio.sleep(0.05)
            pool.sweep(asyncio.get_running_loop().time())

    sweeper = asyncio.create_task(sweep())
    try:
        yield pool, server.sockets[0].getsockname()[1]
    finally:
        sweeper.cancel()
        pool.close()
        server.close()


async def exchange(
    pool: Pool, port: int, data: list[bytes] = GET, *, head: bool = False
) -> tuple[UpstreamConnection, Collected]:
    connection = await pool.take("127.0.0.1", port)
    sink = Collected()
    try:
        async with asyncio.timeout(5):
            await connection.request(data, without_body=head)
            await connection.relay(sink, b"x-extra: 1\r\n")
    finally:
        pool.give("127.0.0.1", port, connection)
    return connection, sink


def always(*pieces: bytes, keep: bool = True) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.01)
            if not keep:
                return

    return serve


PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


async def test_plain_answer_is_one_write_and_the_connection_is_reused() -> None:
    async with upstream(always(PLAIN[:38], PLAIN[38:])) as (pool, port):
        first, sink = await exchange(pool, port)
        assert sink.pieces == [b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nx-extra: 1\r\n\r\nhello"]
        second, sink = await exchange(pool, port)
        assert first is second
        assert sink.data.endswith(b"hello")


async def test_every_split_of_an_answer_gives_the_same_bytes() -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1\r\nd\r\n0\r\nTrail: er\r\n\r\n"
    expected = chunked.replace(b"\r\n\r\n", b"\r\nx-extra: 1\r\n\r\n", 1)
    for answer, want in ((PLAIN, PLAIN.replace(b"\r\n\r\n", b"\r\nx-extra: 1\r\n\r\n")), (chunked, expected)):
        for cut in range(1, len(answer), 3):
            async with upstream(always(answer[:cut], answer[cut:])) as (pool, port):
                connection, sink = await exchange(pool, port)
                assert sink.data == want
                assert connection.reusable


async def test_streamed_pieces_pass_before_the_answer_ends() -> None:
    release = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(0.05)
        for n in range(3):
            writer.write(b"9\r\ndata: %d\n\n\r\n" % n)
            await asyncio.sleep(0.05)
        await release.wait()
        writer.write(b"0\r\n\r\n")

    async with upstream(serve) as (pool, port):
        connection = await pool.take("127.0.0.1", port)
        sink = Collected()
        await connection.request(GET, without_body=False)
        relay = asyncio.create_task(connection.relay(sink, b""))
        await asyncio.sleep(0)
        assert sink.data.endswith(b"chunked\r\n\r\n"), "the head goes on at once"
        await asyncio.sleep(0.3)
        assert sink.pieces[1:] == [b"9\r\ndata: %d\n\n\r\n" % n for n in range(3)]
        assert not relay.done()
        release.set()
        await asyncio.wait_for(relay, 5)
        pool.give("127.0.0.1", port, connection)


async def test_body_that_ends_with_the_connection() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nfirst "
    async with upstream(always(answer, b"second", keep=False)) as (pool, port):
        connection, sink = await exchange(pool, port)
        assert sink.data.endswith(b"\r\n\r\nfirst second")
        assert not connection.reusable
        assert not connection.self_delimited


async def test_interim_answers_are_dropped() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    async with upstream(always(interim + PLAIN)) as (pool, port):
        _, sink = await exchange(pool, port)
        assert sink.data.startswith(b"HTTP/1.1 200 OK")
        assert b"Link" not in sink.data
    async with upstream(always(interim[:30], interim[30:], PLAIN)) as (pool, port):
        _, sink = await exchange(pool, port)
        assert sink.data.startswith(b"HTTP/1.1 200 OK")


async def test_head_and_no_content_have_no_body() -> None:
    async with upstream(always(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")) as (pool, port):
        connection, sink = await exchange(pool, port, head=True)
        assert sink.data.endswith(b"x-extra: 1\r\n\r\n")
        assert not connection.reusable
    async with upstream(always(b"HTTP/1.1 204 No Content\r\n\r\n")) as (pool, port):
        connection, _ = await exchange(pool, port)
        assert connection.status == 204
        assert connection.reusable


async def test_connection_headers_stay_here() -> None:
    answer = (
        b"HTTP/1.1 200 Fine\r\nConnection: keep-alive\r\nKeep-Alive: timeout=5\r\nX-A: b\r\nContent-Length: 2\r\n\r\nok"
    )
    async with upstream(always(answer)) as (pool, port):
        _, sink = await exchange(pool, port)
        assert sink.data == b"HTTP/1.1 200 Fine\r\nX-A: b\r\nContent-Length: 2\r\nx-extra: 1\r\n\r\nok"


async def test_connection_close_is_respected() -> None:
    answer = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"
    async with upstream(always(answer, keep=False)) as (pool, port):
        connection, _ = await exchange(pool, port)
        assert not connection.reusable


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "closed the connection"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n", "closed the connection"),
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n", "malformed"),
        (PLAIN + PLAIN, "more bytes"),
    ],
)
async def test_no_good_answer_before_the_first_byte(answer: bytes, reason: str) -> None:
    async with upstream(always(answer, keep=False)) as (pool, port):
        connection = await pool.take("127.0.0.1", port)
        with pytest.raises(UpstreamError, match=reason) as caught:
            await asyncio.wait_for(connection.request(GET, without_body=False), 5)
        assert not caught.value.stale


async def test_answer_that_breaks_off() -> None:
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhel"
    async with upstream(always(answer, keep=False)) as (pool, port):
        with pytest.raises(UpstreamError, match="before its answer was complete"):
            await exchange(pool, port)


async def test_kept_connection_that_the_replica_closed_is_stale_or_not_taken() -> None:
    async with upstream(always(PLAIN, keep=False)) as (pool, port):
        first, _ = await exchange(pool, port)
        await asyncio.sleep(0.05)
        second = await pool.take("127.0.0.1", port)
        assert first is not second

    async def closes_on_the_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN)
        await reader.readuntil(b"\r\n\r\n")

    async with upstream(closes_on_the_second) as (pool, port):
        first, _ = await exchange(pool, port)
        with pytest.raises(UpstreamError) as caught:
            await exchange(pool, port)
        assert caught.value.stale


async def test_unasked_bytes_end_a_kept_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN)
        await asyncio.sleep(0.05)
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await asyncio.sleep(5)

    async with upstream(serve) as (pool, port):
        first, _ = await exchange(pool, port)
        assert first.reusable
        await asyncio.sleep(0.15)
        assert first.closed


async def test_deadlines_before_and_within_the_answer() -> None:
    fast = replace(Limits(), answer_seconds=0.2)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    async with upstream(silent, fast) as (pool, port):
        with pytest.raises(UpstreamError) as caught:
            await exchange(pool, port)
        assert caught.value.timed_out

    async def stops(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n")
        await asyncio.sleep(30)

    async with upstream(stops, fast) as (pool, port):
        with pytest.raises(UpstreamError) as caught:
            await exchange(pool, port)
        assert caught.value.timed_out


async def test_nothing_listens() -> None:
    async with upstream(always(PLAIN)) as (pool, port):
        pass
    with pytest.raises(UpstreamError, match="refused"):
        await pool.take("127.0.0.1", port)


async def test_a_slow_sink_pauses_the_replica() -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 67108864\r\n\r\n")
        for _ in range(1024):
            writer.write(b"x" * 65_536)
            await writer.drain()
            sent += 65_536

    async with upstream(flood) as (pool, port):
        connection = await pool.take("127.0.0.1", port)
        sink = Collected()
        await connection.request(GET, without_body=False)
        relay = asyncio.create_task(connection.relay(sink, b""))
        await asyncio.sleep(0)
        connection.pause()
        await asyncio.sleep(0.3)
        stopped_at = sent
        assert stopped_at < 32 * 1024 * 1024, "what sockets buffer, not the whole answer"
        await asyncio.sleep(0.2)
        assert sent == stopped_at
        connection.resume()
        await asyncio.wait_for(relay, 20)
        assert len(sink.data) > 67_108_864
        pool.give("127.0.0.1", port, connection)
