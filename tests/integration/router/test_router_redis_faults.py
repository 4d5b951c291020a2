"""Redis killed, wiped or silent under a running router."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from rollstream.core.config.serving import RouterConfig
from rollstream.core.store import Store
from rollstream.router.service import RouterService
from support.http_calls import fetch
from support.raw_replica import RawReplica
from support.until import until

CHAT = "/v1/chat/completions"


async def registered(store: Store) -> bool:
    return [lease.id for lease in await store.registry.list("router")] == ["r"]


async def load_is(store: Store, replica: str, count: int) -> bool:
    return (await store.sessions.loads()).get(replica, 0) == count


class Running:
    """A router and two replicas over one store."""

    def __init__(self, store: Store) -> None:
        config = RouterConfig(router_id="r", registry_interval=0.05, no_replica_timeout=5.0, lease_seconds=1.0)
        self.router = RouterService(config, store)
        self.replicas = [RawReplica(store, id, ttl=1.0) for id in ("a", "b")]
        self._stop = asyncio.Event()

    async def __aenter__(self) -> Running:
        for replica in self.replicas:
            await replica.start()
        self._serving = asyncio.create_task(self.router.serve(self._stop))
        await until(lambda: len(self.router.fleet.view.ready) == 2)
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._stop.set()
        await asyncio.wait_for(self._serving, 15)
        for replica in self.replicas:
            await replica.stop()

    async def who(self, session: str | None = None) -> str:
        headers = {"X_Session_ID": session} if session else {}
        answer = await fetch(self.router.address, "POST", CHAT, b"{}", **headers)
        assert answer.status == 200, answer.body
        return str(answer.json()["replica"])

    async def homes(self, names: list[str]) -> dict[str, str]:
        return {name: await self.who(name) for name in names}


NAMES = [f"s{n}" for n in range(8)]


async def test_redis_killed_and_started_empty_moves_no_session(store: Store, redis_server: Any) -> None:
    async with Running(store) as run:
        homes = await run.homes(NAMES)
        await asyncio.to_thread(redis_server.kill)
        assert await run.homes(NAMES) == homes
        assert {await run.who(f"new{n}") for n in range(4)} == {"a", "b"}, "new ones spread all the same"
        assert {await run.who() for _ in range(4)} == {"a", "b"}
        await until(lambda: run.router.balancer.away)
        ended = await fetch(run.router.address, "POST", "/finish_session", X_Session_ID="s7")
        assert ended.status == 200
        await asyncio.sleep(1.5)  # longer than every lease
        assert await run.homes(NAMES[:7]) == {name: homes[name] for name in NAMES[:7]}

        await asyncio.to_thread(redis_server.start)
        await until(lambda: not run.router.balancer.away and len(run.router.fleet.view.ready) == 2)
        assert await run.homes(NAMES[:7]) == {name: homes[name] for name in NAMES[:7]}
        await until(lambda: registered(store), 3)  # the router's own lease is back


async def test_wiped_redis_is_rebuilt(store: Store, redis_server: Any) -> None:
    async with Running(store) as run:
        homes = await run.homes(NAMES)
        hanging = asyncio.create_task(
            fetch(run.router.address, "POST", CHAT, b"{}", X_Session_ID="s0", X_Do="hang", timeout=20)
        )
        home = next(replica for replica in run.replicas if replica.id == homes["s0"])
        await until(lambda: home.open == 1)
        await asyncio.to_thread(redis_server.wipe)
        assert await run.homes(NAMES) == homes
        await until(lambda: load_is(store, home.id, 1))  # the open request is accounted for again
        home.release.set()
        assert (await hanging).status == 200
        await until(lambda: load_is(store, home.id, 0))


async def test_a_silent_redis_delays_one_request_by_a_second_at_most(store: Store, redis_server: Any) -> None:
    async with Running(store) as run:
        homes = await run.homes(NAMES)
        os.kill(redis_server.pid, signal.SIGSTOP)
        try:
            started = asyncio.get_running_loop().time()
            assert await run.homes(NAMES) == homes
            assert asyncio.get_running_loop().time() - started < 3.0
        finally:
            os.kill(redis_server.pid, signal.SIGCONT)
        await until(lambda: not run.router.balancer.away)
        assert await run.homes(NAMES) == homes
