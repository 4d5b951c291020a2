"""The router between real HTTP replicas and a real Redis: which replica answers, and what is left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from rollstream.core.config.serving import RouterConfig
from rollstream.core.store import Store
from rollstream.router.service import RouterService
from support.http_calls import Answer, Client, fetch
from support.raw_replica import RawReplica
from support.until import until

CHAT = "/v1/chat/completions"


@dataclass
class Fleet:
    """One or more routers and their replicas, all in this process, all over real sockets."""

    store: Store
    routers: list[RouterService] = field(default_factory=list)
    replicas: dict[str, RawReplica] = field(default_factory=dict)
    stops: list[tuple[asyncio.Event, asyncio.Task[None]]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return self.routers[0].address

    async def replica(self, id: str, **settings: Any) -> RawReplica:
        self.replicas[id] = replica = await RawReplica(self.store, id, **settings).start()
        await self.seen(id, settings.get("state", "ready") == "ready")
        return replica

    async def seen(self, id: str, there: bool = True) -> None:
        """Waits until every router has (or has not) the replica among the ready ones."""
        await until(lambda: all((id in router.fleet.view.ready) is there for router in self.routers))

    async def router(self, **settings: Any) -> RouterService:
        settings = {"registry_interval": 0.05, "no_replica_timeout": 5.0, "drain_timeout": 2.0} | settings
        config = RouterConfig(router_id=f"router{len(self.routers)}", **settings)
        service, stop = RouterService(config, self.store), asyncio.Event()
        self.stops.append((stop, asyncio.create_task(service.serve(stop))))
        await until(lambda: bool(service.address))
        self.routers.append(service)
        return service

    async def chat(self, session: str | None = None, *, body: bytes = b"{}", **headers: str) -> Answer:
        if session is not None:
            headers["X_Session_ID"] = session
        return await fetch(self.address, "POST", CHAT, body, **headers)

    async def who(self, session: str | None = None, **headers: str) -> str:
        answer = await self.chat(session, **headers)
        assert answer.status == 200, answer.body
        return str(answer.json()["replica"])

    async def close(self) -> None:
        for stop, task in self.stops:
            stop.set()
            await asyncio.wait_for(task, 10)
        for replica in self.replicas.values():
            await replica.stop()


@asynccontextmanager
async def fleet_of(store: Store, *ids: str, **router: Any) -> AsyncIterator[Fleet]:
    fleet = Fleet(store)
    try:
        await fleet.router(**router)
        for id in ids:
            await fleet.replica(id)
        yield fleet
    finally:
        await fleet.close()


# --- sessions and spread ---


async def test_a_session_stays_and_new_ones_spread(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        homes = {f"s{n}": await fleet.who(f"s{n}") for n in range(10)}
        assert Counter(homes.values()) == {"a": 5, "b": 5}
        for _ in range(3):
            for session, home in homes.items():
                assert await fleet.who(session) == home


async def test_requests_without_a_session_are_spread(store: Store) -> None:
    async with fleet_of(store, "a", "b", "c") as fleet:
        seen = Counter([await fleet.who() for _ in range(30)])
        assert seen == {"a": 10, "b": 10, "c": 10}


async def test_new_sessions_avoid_the_loaded_replica(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        home = await fleet.who("heavy")
        other = "b" if home == "a" else "a"
        hanging = [asyncio.create_task(fleet.chat("heavy", X_Do="hang")) for _ in range(3)]
        await until(lambda: fleet.replicas[home].open == 3)
        await asyncio.sleep(0.05)
        assert {await fleet.who(f"n{n}") for n in range(6)} == {other}
        assert {await fleet.who() for _ in range(6)} == {other}
        fleet.replicas[home].release.set()
        assert {(await task).status for task in hanging} == {200}


async def test_two_routers_share_sessions_and_load(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        await fleet.router()
        await until(lambda: len(fleet.routers[1].fleet.view.ready) == 2)
        first, second = (router.address for router in fleet.routers)
        homes = {f"s{n}": await fleet.who(f"s{n}") for n in range(6)}
        for session, home in homes.items():
            answer = await fetch(second, "POST", CHAT, X_Session_ID=session)
            assert answer.json()["replica"] == home
        hanging = [asyncio.create_task(fetch(first, "POST", CHAT, X_Session_ID="s0", X_Do="hang")) for _ in range(3)]
        await until(lambda: fleet.replicas[homes["s0"]].open == 3)
        await asyncio.sleep(0.15)
        for n in range(4):
            answer = await fetch(second, "POST", CHAT, X_Session_ID=f"new{n}")
            assert answer.json()["replica"] != homes["s0"]
        answer = await fetch(second, "POST", CHAT)
        assert answer.json()["replica"] != homes["s0"]
        fleet.replicas[homes["s0"]].release.set()
        await asyncio.gather(*hanging)


async def test_a_finished_session_is_free_again(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        assert await fleet.who("one") == "a"
        await fleet.replica("b")
        assert await fleet.who("one") == "a"
        by_header = await fetch(fleet.address, "POST", "/finish_session", X_Session_ID="one")
        by_body = await fetch(fleet.address, "POST", "/finish_session", b'{"session_id": "two"}')
        assert (by_header.status, by_body.status) == (200, 200)
        for bad in (b"", b"{}", b'{"session_id": 3}', b'{"session_id": ""}', b"not json"):
            assert (await fetch(fleet.address, "POST", "/finish_session", bad)).status == 400


async def test_a_session_expires_when_idle(store: Store) -> None:
    async with fleet_of(store, "a", "b", session_ttl=0.3) as fleet:
        await fleet.who("idle")
        assert await session_keys(store)
        await asyncio.sleep(0.6)
        await fleet.who()
        assert not await session_keys(store)


async def session_keys(store: Store) -> list[str]:
    """What Redis holds of sessions, whatever its shape: keys and hash fields that name one."""
    found = []
    async for key in store.redis.scan_iter(match="rs:*"):
        name = key.decode() if isinstance(key, bytes) else key
        if "session" in name:
            found.append(name)
    return found


async def test_a_thousand_finished_sessions_leave_nothing(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        before = {key async for key in store.redis.scan_iter(match="rs:*")}

        async def run(worker: int) -> None:
            client = await Client.open(fleet.address)
            for n in range(50):
                session = f"w{worker}-{n}"
                for _ in range(2):
                    client.send("POST", CHAT, b"{}", X_Session_ID=session)
                    assert (await client.answer()).status == 200
                client.send("POST", "/finish_session", X_Session_ID=session)
                assert (await client.answer()).status == 200
            client.close()

        await asyncio.gather(*(run(worker) for worker in range(20)))
        await asyncio.sleep(0.1)
        after = {key async for key in store.redis.scan_iter(match="rs:*")}
        assert not await session_keys(store)
        assert len(after) <= len(before) + 1, after
        assert fleet.routers[0].balancer.open == {}
        assert len(fleet.routers[0].balancer.bindings) == 0
        assert sum((await store.sessions.loads()).values()) == 0


# --- faults of replicas ---


@pytest.mark.parametrize("fault", ["reset", "status:502", "status:503", "status:504"])
async def test_another_replica_answers_before_the_first_byte(store: Store, fault: str) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        fleet.replicas["a"].default = fault
        for n in range(4):
            assert await fleet.who(f"s{n}") == "b"
            assert await fleet.who() == "b"
        assert fleet.replicas["a"].requests, "it was tried"
        await until(lambda: fleet.routers[0].balancer.open == {})


async def test_a_dead_replica_is_replaced_and_its_sessions_move_for_good(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        homes = {f"s{n}": await fleet.who(f"s{n}") for n in range(8)}
        await fleet.replicas["a"].kill()  # the lease is still there
        assert {await fleet.who(session) for session in homes} == {"b"}
        await fleet.replica("c")
        assert {await fleet.who(session) for session in homes} == {"b"}, "re-bound, not tried elsewhere again"


async def test_a_replica_that_leaves_loses_its_sessions_to_the_others(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        homes = {f"s{n}": await fleet.who(f"s{n}") for n in range(8)}
        leaving = fleet.replicas["a"]
        leaving.state = "draining"
        await leaving.beat()
        await fleet.seen("a", False)
        assert {await fleet.who(session) for session in homes} == {"b"}


async def test_the_last_failure_is_told_when_every_replica_fails(store: Store) -> None:
    async with fleet_of(store, "a", "b", no_replica_timeout=0.3) as fleet:
        for replica in fleet.replicas.values():
            replica.default = "reset"
        answer = await fleet.chat("s")
        assert answer.status == 502
        assert answer.json()["error"]["code"] == "replica_failed"
        assert await settled(fleet)


async def test_the_only_replica_s_503_passes_through(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        answer = await fleet.chat(X_Do="status:503")
        assert answer.status == 503
        assert answer.json()["replica"] == "a"


async def test_a_request_waits_for_its_only_replica_to_come_back(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        await fleet.replicas["a"].kill()
        waiting = asyncio.create_task(fleet.chat("s"))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await fleet.replica("a")
        assert (await asyncio.wait_for(waiting, 5)).json()["replica"] == "a"


async def test_no_retry_after_the_first_byte(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await fleet.chat("s", X_Do="half")
        assert sum(len(replica.requests) for replica in fleet.replicas.values()) == 1
        assert await settled(fleet)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 429, 500])
async def test_other_statuses_pass_untouched(store: Store, status: int) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        answer = await fleet.chat("s", X_Do=f"status:{status}")
        assert answer.status == status
        assert sum(len(replica.requests) for replica in fleet.replicas.values()) == 1


async def settled(fleet: Fleet) -> bool:
    """Load is back to nothing, here and in Redis."""
    await until(lambda: all(router.balancer.open == {} for router in fleet.routers))

    async def none_in_redis() -> bool:
        return not sum((await fleet.store.sessions.loads()).values())

    await until(none_in_redis, 3)
    return True


# --- clients ---


async def test_a_client_that_hangs_up_cancels_the_replica_and_frees_the_load(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        clients = [await Client.open(fleet.address) for _ in range(5)]
        for n, client in enumerate(clients):
            client.send("POST", CHAT, b"{}", X_Session_ID=f"s{n}", X_Do="hang")
        await until(lambda: fleet.replicas["a"].open == 5)
        for client in clients:
            client.close()
        await until(lambda: fleet.replicas["a"].hung_up == 5)
        assert await settled(fleet)


async def test_a_client_that_hangs_up_mid_stream(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        client = await Client.open(fleet.address)
        client.send("POST", CHAT, b"{}", X_Session_ID="s", X_Do="sse:1000")
        await client.head()
        await client.reader.readline()
        client.close()
        await until(lambda: fleet.replicas["a"].open == 0)
        assert await settled(fleet)


async def test_a_stream_passes_piece_by_piece(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        client = await Client.open(fleet.address)
        client.send("POST", CHAT, b"{}", X_Do="sse:8")
        status, headers = await client.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        times, events = [], []
        for _ in range(8):
            size = int(await client.reader.readline(), 16)
            events.append(await client.reader.readexactly(size))
            await client.reader.readexactly(2)
            times.append(asyncio.get_running_loop().time())
        assert events == [b"data: %d\n\n" % n for n in range(8)]
        assert times[-1] - times[0] > 0.15, "as they came, not at the end"
        client.close()


async def test_a_client_that_does_not_read_holds_the_replica_back(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        client = await Client.open(fleet.address)
        client.writer.transport.pause_reading()
        client.send("POST", CHAT, b"{}", X_Do="flood:48")
        await asyncio.sleep(0.5)
        assert 0 < fleet.replicas["a"].flooded < 32, "sockets' buffers, not the whole answer"
        client.writer.transport.resume_reading()
        answer = await client.answer(timeout=20)
        assert len(answer.body) == 48 << 20
        client.close()


async def test_large_bodies_pass_untouched(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        body = bytes(range(256)) * 8192
        answer = await fleet.chat("s", body=body)
        assert answer.json()["size"] == len(body)
        assert fleet.replicas["a"].requests[-1].body == body
        seen = fleet.replicas["a"].requests[-1].headers
        assert seen["x-session-id"] == "s"


async def test_bad_requests_reach_no_replica(store: Store) -> None:
    async with fleet_of(store, "a", max_body_bytes=1000) as fleet:
        assert (await fleet.chat(body=b"x" * 1001)).status == 413
        assert (await fleet.chat(X_Min_Policy_Version="new")).status == 400
        for path in ("/pause", "/update_weights", "/collective_rpc", "/v1/load_lora_adapter", "/rollstream/load"):
            for method in ("GET", "POST"):
                answer = await fetch(fleet.address, method, path)
                assert (answer.status, answer.json()["error"]["code"]) == (404, "unknown_route")
        assert (await fetch(fleet.address, "DELETE", CHAT)).headers["allow"] == "POST"
        assert fleet.replicas["a"].requests == []
        assert (await fetch(fleet.address, "GET", "/v1/models?x=1")).json()["path"] == "/v1/models?x=1"
        assert (await fetch(fleet.address, "POST", "/inference/v1/generate", b"{}")).json()["replica"] == "a"


# --- policy versions and readiness ---


async def test_min_version_takes_a_fresh_enough_replica(store: Store) -> None:
    async with fleet_of(store) as fleet:
        await fleet.replica("old", version=1)
        await fleet.replica("new", version=2)
        assert {await fleet.who(X_Min_Policy_Version="2") for _ in range(4)} == {"new"}
        assert {await fleet.who(f"s{n}", X_Min_Policy_Version="0:2") for n in range(4)} == {"new"}


async def test_min_version_holds_until_a_replica_has_it(store: Store) -> None:
    async with fleet_of(store, "a") as fleet:
        held = [asyncio.create_task(fleet.chat(session, X_Min_Policy_Version="0:1")) for session in (None, "s")]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in held)
        fleet.replicas["a"].version = 1
        for task in held:
            assert (await asyncio.wait_for(task, 5)).status == 200


async def test_no_replica_is_a_503_that_says_why(store: Store) -> None:
    async with fleet_of(store, no_replica_timeout=0.2) as fleet:
        answer = await fleet.chat()
        assert answer.status == 503
        assert "No inference replica is registered" in answer.json()["error"]["message"]
        await fleet.replica("a", state="loading")
        await asyncio.sleep(0.2)
        assert "a is loading" in (await fleet.chat("s")).json()["error"]["message"]
        assert (await fetch(fleet.address, "GET", "/ready")).status == 503
        await fleet.replica("b", version=3)
        assert "the newest is 0:3" in (await fleet.chat(X_Min_Policy_Version="9")).json()["error"]["message"]
        assert (await fetch(fleet.address, "GET", "/ready")).status == 200
        assert (await fetch(fleet.address, "GET", "/health")).status == 200


async def test_a_client_that_leaves_while_it_is_held_is_forgotten(store: Store) -> None:
    async with fleet_of(store) as fleet:
        client = await Client.open(fleet.address)
        client.send("POST", CHAT, b"{}", X_Session_ID="gone")
        await asyncio.sleep(0.1)
        client.close()
        replica = await fleet.replica("a")
        await asyncio.sleep(0.2)
        assert replica.requests == []


async def test_replica_timeout_is_a_504(store: Store) -> None:
    async with fleet_of(store, "a", request_timeout=0.2) as fleet:
        answer = await fleet.chat("s", X_Do="hang")
        assert (answer.status, answer.json()["error"]["code"]) == (504, "replica_timeout")
        assert await settled(fleet)


async def test_metrics_and_replicas_tell_what_happened(store: Store) -> None:
    async with fleet_of(store, "a", "b") as fleet:
        fleet.replicas["a"].default = "reset"
        for _ in range(4):
            await fleet.who()
        await fetch(fleet.address, "GET", "/nowhere")
        text = (await fetch(fleet.address, "GET", "/metrics")).body.decode()
        assert 'rollstream_router_requests_total{source="replica",status="200"} 4.0' in text
        assert 'rollstream_router_requests_total{source="router",status="404"} 1.0' in text
        assert "rollstream_router_retries_total 4.0" in text
        assert "rollstream_router_ready_replicas 2.0" in text
        listed = (await fetch(fleet.address, "GET", "/replicas")).json()
        assert [replica["id"] for replica in listed["replicas"]] == ["a", "b"]
        assert listed["redis"] == "ok"
