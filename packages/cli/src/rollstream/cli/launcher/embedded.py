"""The servers of a launch: those that the configuration names, or embedded ones that are kept alive."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

from rollstream.cli.launcher.restarts import GiveUp, RestartPolicy
from rollstream.cli.servers import EmbeddedNats, EmbeddedRedis, EmbeddedServer
from rollstream.core.config import RlConfig
from rollstream.core.errors import RollstreamError

CHECK_INTERVAL = 0.5
"""Seconds between looks at the embedded servers."""


class Servers:
    """Lifecycle: :meth:`start`, then :meth:`keep` until cancelled, then :meth:`stop`. A server whose URL is given is
    nobody's to start or stop here. A restarted server keeps its port and its data."""

    def __init__(self, config: RlConfig, run_dir: Path, report: Callable[[str], None]) -> None:
        self._report = report
        self._max_restarts = config.max_restarts
        self._nats = None if config.bus.url else EmbeddedNats(run_dir / "bus")
        self._redis = None if config.store.url else EmbeddedRedis(run_dir / "store")
        self._given = (config.bus.url, config.store.url)

    @property
    def bus_url(self) -> str:
        """Where NATS is."""
        return self._nats.url if self._nats else str(self._given[0])

    @property
    def store_url(self) -> str:
        """Where Redis is."""
        return self._redis.url if self._redis else str(self._given[1])

    def pids(self) -> list[int]:
        """Pids of the embedded servers that run."""
        return [server.pid for server in self._embedded() if server.pid is not None]

    async def start(self) -> None:
        """Start what is ours. Raises ``UsageError`` naming the server that did not come up."""
        # One thread starts them all: the kernel ties a child to the thread that made it, and pool threads stay.
        for server in self._embedded():
            await asyncio.to_thread(server.start)

    async def keep(self) -> None:
        """Restart a server that died, on the same port and data; raises when it keeps dying."""
        servers = self._embedded()
        policies = {server.name: RestartPolicy(self._max_restarts, finite=False) for server in servers}
        started = dict.fromkeys(policies, time.monotonic())
        while True:
            await asyncio.sleep(CHECK_INTERVAL)
            for server in servers:
                if server.pid is not None:
                    continue
                decision = policies[server.name].decide(-signal.SIGKILL, started[server.name], time.monotonic())
                if isinstance(decision, GiveUp):
                    raise RollstreamError(f"{server.name} keeps dying:\n{server.tail()}", hint=f"see {server.log}")
                self._report(f"{server.name} died; restarting it on its port and data")
                await asyncio.to_thread(server.start)
                started[server.name] = time.monotonic()

    async def stop(self) -> None:
        """Stop what is ours."""
        for server in self._embedded():
            await asyncio.to_thread(server.stop)

    def _embedded(self) -> list[EmbeddedServer]:
        return [server for server in (self._nats, self._redis) if server is not None]
