"""What the router costs: the same load straight to a stub replica and through the router, paired in one run.

    python benchmarks/router/overhead.py [--requests 4000] [--concurrency 16] [--rounds 3] [--body 1024]

Prints, for each way, throughput, latency, and CPU seconds per 1,000 requests of the stub and of the router, then the
ratios. Only ratios within one run mean something: machines drift by tens of per cent between runs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httptools
import psutil
import uvloop

from rollstream.cli.servers import EmbeddedRedis
from rollstream.core.run import RunDir
from rollstream.core.store import Lease, Store

HOST = "127.0.0.1"


class Stub(asyncio.Protocol):
    """A replica that answers at once with as many bytes as it was sent."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.parser = httptools.HttpRequestParser(self)
        self.size = 0

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, data: bytes) -> None:
        self.size += len(data)

    def on_message_complete(self) -> None:
        body = b"x" * self.size
        self.size = 0
        head = b"HTTP/1.1 200 OK\r\nserver: stub\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % len(body) + body)  # type: ignore[attr-defined]


async def serve_stub() -> None:
    server = await asyncio.get_running_loop().create_server(Stub, HOST, 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


class LoadConnection(asyncio.Protocol):
    """One client: sends the next request when the last is answered."""

    def __init__(self, load: Load, session: str | None) -> None:
        self.load = load
        named = b"X-Session-ID: %b\r\n" % session.encode() if session else b""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nAccept: */*\r\nUser-Agent: bench\r\n"
        length = b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % load.body
        self.request = head + named + length + b"x" * load.body
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.next()

    def next(self) -> None:
        if self.load.left == 0:
            self.load.busy -= 1
            self.transport.close()
            if self.load.busy == 0:
                self.load.done.set()
            return
        self.load.left -= 1
        self.began = time.perf_counter()
        self.transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_headers_complete(self) -> None:
        if self.parser.get_status_code() != 200:
            raise RuntimeError(f"status {self.parser.get_status_code()}")

    def on_message_complete(self) -> None:
        self.load.latencies.append(time.perf_counter() - self.began)
        self.next()


@dataclass
class Load:
    left: int
    busy: int
    body: int
    latencies: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Result:
    rate: float
    p50: float
    p99: float
    stub_cpu: float
    router_cpu: float


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(
    port: int, options: argparse.Namespace, stub: psutil.Process, router: psutil.Process, sessions: bool
) -> Result:
    load = Load(options.requests, options.concurrency, options.body)
    loop = asyncio.get_running_loop()
    before, began = (cpu(stub), cpu(router)), time.perf_counter()
    for n in range(options.concurrency):
        session = f"session-{n}" if sessions else None
        await loop.create_connection(lambda session=session: LoadConnection(load, session), HOST, port)  # type: ignore[misc]
    async with asyncio.timeout(300):
        await load.done.wait()
    seconds = time.perf_counter() - began
    ordered = sorted(load.latencies)
    count = len(ordered)
    return Result(
        rate=count / seconds,
        p50=ordered[count // 2] * 1e3,
        p99=ordered[int(count * 0.99)] * 1e3,
        stub_cpu=(cpu(stub) - before[0]) / count * 1e3,
        router_cpu=(cpu(router) - before[1]) / count * 1e3,
    )


async def bench(options: argparse.Namespace, redis_url: str, run_id: str, stub_port: int, pids: list[int]) -> None:
    store = await Store.connect(redis_url, run_id)
    address = f"http://{HOST}:{stub_port}"
    await store.registry.put(Lease(id="stub", role="inference", address=address, state="ready", pid=pids[0]), 3600)
    async with asyncio.timeout(30):
        while not (routers := await store.registry.list("router")):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)  # a look at the registry
    router_port = int(routers[0].address.rsplit(":", 1)[1])
    stub, router = (psutil.Process(pid) for pid in pids)
    ways = {"direct": (stub_port, False), "routed": (router_port, False), "with session": (router_port, True)}
    results: dict[str, list[Result]] = {way: [] for way in ways}
    for round_ in range(options.rounds + 1):
        for way, (port, sessions) in ways.items():
            result = await measure(port, options, stub, router, sessions)
            if round_:  # the first warms up
                results[way].append(result)
    await store.close()
    report(results, options)


def report(results: dict[str, list[Result]], options: argparse.Namespace) -> None:
    print(f"{options.requests} requests a round, {options.rounds} rounds, {options.concurrency} clients, ", end="")
    print(f"{options.body} B bodies both ways, {os.cpu_count()} cores; medians of the rounds")
    print(f"{'':14}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'stub CPU s/1k':>15}{'router CPU s/1k':>17}")
    medians = {}
    for way, rounds in results.items():
        medians[way] = m = Result(*(statistics.median(getattr(r, f) for r in rounds) for f in Result.__annotations__))
        print(f"{way:14}{m.rate:9.0f}{m.p50:9.2f}{m.p99:9.2f}{m.stub_cpu:15.4f}{m.router_cpu:17.4f}")
    direct = medians["direct"]
    for way in ("routed", "with session"):
        m = medians[way]
        print(f"{way}: router CPU = {m.router_cpu / direct.stub_cpu:.1f} x the stub's, ", end="")
        print(f"added p50 {m.p50 - direct.p50:+.2f} ms, throughput {m.rate / direct.rate:.2f} of direct")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--body", type=int, default=1024, help="bytes of each request and answer body")
    parser.add_argument("--stub", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stub:
        uvloop.run(serve_stub())
        return
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        redis = EmbeddedRedis(directory / "redis")
        redis.start()
        own: list[subprocess.Popen[str]] = []
        try:
            own.append(subprocess.Popen([sys.executable, __file__, "--stub"], stdout=subprocess.PIPE, text=True))
            assert own[0].stdout is not None
            stub_port = int(own[0].stdout.readline())
            run = RunDir.create(directory / "run", name="bench")
            flags = ["--run-dir", str(directory / "run"), "--store.url", redis.url]
            own.append(subprocess.Popen([sys.executable, "-m", "rollstream.router.main", *flags], text=True))
            pids = [process.pid for process in own]
            uvloop.run(bench(options, redis.url, run.run_id, stub_port, pids))
        finally:
            for process in own:
                process.terminate()
                process.wait()
            redis.stop()


if __name__ == "__main__":
    main()
