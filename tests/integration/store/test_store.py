"""Leases, sessions and progress on a real Redis: expiry by the server's clock, outages, wipes, leaks."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest
from redis.exceptions import RedisError

from rollstream.cli.servers import EmbeddedRedis
from rollstream.core.store import EvictingStore, Lease, ProgressLeases, Store, StoreUnavailable
from support.until import until

LONG = 60.0


def replica(id: str, **fields: object) -> Lease:
    return Lease(**{"id": id, "role": "inference", "state": "ready", "address": f"http://10.0.0.1/{id}", **fields})  # type: ignore[arg-type]


async def keys_of(store: Store) -> list[str]:
    return sorted([key.decode() async for key in store.redis.scan_iter(match="*")])


# --- connecting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_an_evicting_redis_is_refused(redis_server: EmbeddedRedis, run_id: str, policy: str) -> None:
    allowed = await Store.connect(redis_server.url, run_id)
    await allowed.redis.config_set("maxmemory-policy", policy)
    await allowed.close()
    with pytest.raises(EvictingStore, match=policy) as refused:
        await Store.connect(redis_server.url, run_id)
    assert "CONFIG SET maxmemory-policy noeviction" in str(refused.value) and refused.value.exit_code == 2


async def test_an_eviction_policy_that_may_not_be_asked_is_found_all_the_same(
    redis_server: EmbeddedRedis, run_id: str
) -> None:
    admin = await Store.connect(redis_server.url, run_id)
    await admin.redis.config_set("maxmemory-policy", "allkeys-lru")
    await admin.redis.acl_setuser(
        "managed", enabled=True, passwords=["+hunter2"], keys=["*"], categories=["+@all"], commands=["-config"]
    )
    await admin.close()
    url = redis_server.url.replace("redis://", "redis://managed:hunter2@")
    with pytest.raises(EvictingStore, match="allkeys-lru"):
        await Store.connect(url, run_id)


async def test_a_redis_that_is_not_there_is_named_within_the_time_given() -> None:
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match=r"redis://127\.0\.0\.1:1/0") as refused:
        await Store.connect("redis://:hunter2@127.0.0.1:1/0", "run", connect_timeout=0.5)
    assert time.monotonic() - began < 2 and "--store.url" in str(refused.value)
    assert "hunter2" not in str(refused.value)


async def test_what_is_no_url_is_refused() -> None:
    with pytest.raises(Exception, match="is not a Redis URL"):
        await Store.connect("127.0.0.1:6379", "run", connect_timeout=0.5)


async def test_a_wrong_password_is_told_at_once_and_not_shown(redis_server: EmbeddedRedis, run_id: str) -> None:
    admin = await Store.connect(redis_server.url, run_id)
    await admin.redis.config_set("requirepass", "hunter2")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="refuses the password") as refused:
        await Store.connect(redis_server.url, run_id, connect_timeout=20, password="hunter3")
    assert time.monotonic() - began < 5 and "hunter" not in str(refused.value)
    let_in = await Store.connect(redis_server.url, run_id, password="hunter2")
    assert await let_in.registry.list("router") == []
    await let_in.close()
    await admin.close()


# --- leases --------------------------------------------------------------------------------------------------------


async def test_leases_expire_by_the_servers_clock_and_leave_nothing(store: Store) -> None:
    await store.registry.put(replica("a"), LONG)
    await store.registry.put(replica("b"), 0.05)
    assert [lease.id for lease in await store.registry.list("inference")] == ["a", "b"]
    seconds, micros = await store.redis.time()
    [a, _] = await store.registry.list("inference")
    assert a.expires == pytest.approx(seconds + micros / 1e6 + LONG, abs=1.0)
    await asyncio.sleep(0.06)
    assert [lease.id for lease in await store.registry.list("inference")] == ["a"]
    await store.registry.drop("inference", "a")
    assert await store.registry.list("inference") == [] and await keys_of(store) == []


async def test_a_lease_is_renewed_whole_and_roles_stand_apart(store: Store) -> None:
    await store.registry.put(replica("x", version=3, kv_usage=0.25, detail="ü"), 0.05)
    await store.registry.put(replica("x", version=4), LONG)
    await store.registry.put(Lease(id="x", role="router", address="http://h:1"), LONG)
    await asyncio.sleep(0.06)
    [lease] = await store.registry.list("inference")
    assert (lease.version, lease.kv_usage, lease.detail, lease.role) == (4, 0.0, "", "inference")
    assert [found.address for found in await store.registry.list("router")] == ["http://h:1"]


async def test_only_ready_replicas_are_chosen(store: Store) -> None:
    choose = store.sessions.choose
    assert await choose("s", router="r", ttl=LONG, load_ttl=LONG) is None
    await store.registry.put(replica("a", state="loading"), LONG)
    await store.registry.put(Lease(id="r", role="router", state="ready"), LONG)
    assert await choose("s", router="r", ttl=LONG, load_ttl=LONG) is None
    await store.registry.put(replica("a"), 0.05)
    await store.registry.put(replica("b", state="draining"), LONG)
    chosen = await choose("s", router="r", ttl=LONG, load_ttl=LONG)
    assert chosen is not None and (chosen.replica, chosen.bound) == ("a", False)
    await asyncio.sleep(0.06)
    assert await choose("s", router="r", ttl=LONG, load_ttl=LONG) is None, "its lease has run out"


async def test_runs_on_one_redis_do_not_meet(store: Store) -> None:
    other = Store(store.redis, store.run + "x")
    await store.registry.put(replica("a"), LONG)
    await store.progress.waiting("trainer", "0", "batch")
    assert await other.registry.list("inference") == [] and await other.progress.list() == []
    assert await other.sessions.choose("s", router="r", ttl=LONG, load_ttl=LONG) is None


async def test_all_keys_of_a_run_lie_in_one_slot(store: Store) -> None:
    await store.registry.put(replica("a"), LONG)
    await store.sessions.choose("s", router="r", ttl=LONG, load_ttl=LONG)
    await store.progress.working("trainer", "0")
    keys = await keys_of(store)
    assert len(keys) >= 7 and all(key.startswith(f"rs:{{{store.run}}}:") for key in keys)


# --- sessions ------------------------------------------------------------------------------------------------------


async def test_ten_thousand_sessions_leave_no_key(store: Store) -> None:
    for id in "abc":
        await store.registry.put(replica(id), LONG)

    async def one(number: int) -> str:
        chosen = await store.sessions.choose(f"s{number}", router="r", ttl=LONG, load_ttl=LONG)
        assert chosen is not None
        return chosen.replica

    spread = [await asyncio.gather(*(one(n) for n in range(start, start + 500))) for start in range(0, 10_000, 500)]
    counts = {id: sum(chunk.count(id) for chunk in spread) for id in "abc"}
    assert max(counts.values()) - min(counts.values()) <= 1, counts
    assert await store.sessions.loads() == counts
    for start in range(0, 10_000, 500):
        await asyncio.gather(*(store.sessions.finish(f"s{n}") for n in range(start, start + 500)))
    await store.sessions.report("r", {}, ttl=LONG)
    for id in "abc":
        await store.registry.drop("inference", id)
    assert await keys_of(store) == []


async def test_abandoned_sessions_and_a_dead_routers_load_go_by_themselves(store: Store) -> None:
    await store.registry.put(replica("a"), LONG)
    for n in range(200):
        await store.sessions.choose(f"s{n}", router="dead", ttl=0.05, load_ttl=0.05)
    assert await store.sessions.loads() == {"a": 200}
    await asyncio.sleep(0.06)
    assert await store.sessions.loads() == {}
    await store.registry.drop("inference", "a")
    assert await keys_of(store) == []


async def test_two_routers_agree_under_concurrency(store: Store, redis_server: EmbeddedRedis) -> None:
    other = await Store.connect(redis_server.url, store.run)
    for id in "ab":
        await store.registry.put(replica(id), LONG)

    async def turn(number: int) -> None:
        session = f"s{number % 40}"
        where = [
            await each.sessions.choose(session, router=name, ttl=LONG, load_ttl=LONG)
            for each, name in ((store, "r0"), (other, "r1"))
        ]
        assert where[0] is not None and where[1] is not None
        assert where[0].replica == where[1].replica and where[1].bound

    await asyncio.gather(*(turn(number) for number in range(400)))
    assert sum((await store.sessions.loads()).values()) == 800
    assert sum((await store.sessions.loads(but="r1")).values()) == 400
    await other.close()


async def test_a_session_whose_replica_is_gone_goes_to_the_least_loaded_and_not_to_a_memory(store: Store) -> None:
    await store.registry.put(replica("a"), LONG)
    first = await store.sessions.choose("s", router="r", ttl=LONG, load_ttl=LONG)
    assert first is not None and first.replica == "a"
    for id in "bc":
        await store.registry.put(replica(id), LONG)
    await store.sessions.report("other", {"b": 5}, ttl=LONG)
    await store.registry.drop("inference", "a")
    moved = await store.sessions.choose("s", router="r", ttl=LONG, load_ttl=LONG, preferred="b")
    assert moved is not None and (moved.replica, moved.bound) == ("c", False)


async def test_a_run_that_was_killed_leaves_no_key_though_nobody_calls_any_more(store: Store) -> None:
    for role in ("inference", "router", "trainer"):
        await store.registry.put(replica("a", role=role), 0.4)
    for n in range(3):
        await store.sessions.choose(f"long{n}", router="r", ttl=0.4, load_ttl=0.4)
        await store.sessions.choose(f"short{n}", router="q", ttl=0.1, load_ttl=0.1)
    await store.registry.put(replica("b"), 0.1)
    await asyncio.sleep(0.15)
    assert [lease.id for lease in await store.registry.list("inference")] == ["a"], "the longest entry keeps the key"
    again = await store.sessions.choose("long0", router="r", ttl=0.1, load_ttl=0.1)
    assert again is not None and again.bound
    await asyncio.sleep(0.5)
    assert await keys_of(store) == []


# --- outages -------------------------------------------------------------------------------------------------------


async def test_an_outage_is_an_error_a_call_and_never_a_hang(store: Store, redis_server: EmbeddedRedis) -> None:
    await store.registry.put(replica("a"), LONG)
    redis_server.kill()
    began = time.monotonic()
    for _ in range(20):
        with pytest.raises((RedisError, OSError)):
            await store.registry.put(replica("a"), LONG)
    assert time.monotonic() - began < 5
    redis_server.start()
    await store.registry.put(replica("a"), LONG)
    assert [lease.id for lease in await store.registry.list("inference")] == ["a"], "the same object, no reconnect call"


async def test_a_server_that_hangs_costs_a_deadline(store: Store, redis_server: EmbeddedRedis) -> None:
    pid = redis_server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        with pytest.raises(OSError):
            await store.registry.list("inference")
        assert time.monotonic() - began < 8
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: answers(store))


async def answers(store: Store) -> bool:
    try:
        await store.registry.list("inference")
    except OSError:
        return False
    return True


async def test_a_wipe_is_healed_by_the_next_heartbeats(store: Store, redis_server: EmbeddedRedis) -> None:
    for id in "ab":
        await store.registry.put(replica(id), LONG)
    first = await store.sessions.choose("s", router="r", ttl=LONG, load_ttl=LONG)
    assert first is not None
    redis_server.wipe()
    await store.redis.script_flush()  # the scripts are gone too
    for id in "ab":
        await store.registry.put(replica(id), LONG)
    again = await store.sessions.choose("s", router="r", ttl=LONG, load_ttl=LONG, preferred="b")
    assert again is not None and (again.replica, again.bound) == ("b", False), "taken over from the router's memory"


# --- progress ------------------------------------------------------------------------------------------------------


async def test_since_counts_from_the_start_of_a_wait(store: Store) -> None:
    await store.progress.waiting("trainer", "0", "batch", deadline=123.0, detail="step 7")
    [first] = await store.progress.list()
    await asyncio.sleep(0.02)
    await store.progress.waiting("trainer", "0", "batch", detail="step 7, again | with a bar")
    [same] = await store.progress.list()
    assert same.since == first.since and same.detail.endswith("| with a bar") and first.deadline == 123.0
    await store.progress.waiting("trainer", "0", "a|b")
    [other] = await store.progress.list()
    assert other.since > first.since and other.waiting == "a|b"
    await store.progress.waiting("trainer", "0", "a|b")
    assert [entry.since for entry in await store.progress.list()] == [other.since]
    await store.progress.working("trainer", "0")
    [working] = await store.progress.list()
    assert working.waiting == "" and working.since > other.since


async def test_progress_of_many_is_sorted_and_by_the_servers_clock(store: Store) -> None:
    for component, id in [("trainer", "0"), ("env-worker", "b"), ("env-worker", "a")]:
        await store.progress.waiting(component, id, "reason")
    entries = await store.progress.list()
    assert [(entry.component, entry.id) for entry in entries] == [
        ("env-worker", "a"), ("env-worker", "b"), ("trainer", "0"),
    ]  # fmt: skip
    seconds, _ = await store.redis.time()
    assert all(abs(entry.since - seconds) < 2 for entry in entries)


async def test_the_progress_of_the_dead_goes_by_itself(store: Store) -> None:
    progress = ProgressLeases(store.redis, store.keys, ttl=0.3)
    await progress.waiting("env-worker", "dead", "episodes")
    for _ in range(4):
        await asyncio.sleep(0.1)
        await progress.waiting("env-worker", "alive", "episodes")
    assert [entry.id for entry in await progress.list()] == ["alive"]
    await asyncio.sleep(0.35)
    assert await keys_of(store) == []
