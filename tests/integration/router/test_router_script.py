"""The Lua script of ``sticky_least_loaded`` against a model of the policy, on a real Redis."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from rollstream.cli.servers import EmbeddedRedis
from rollstream.core.store import Lease, Store

T = TypeVar("T")
REPLICAS = ["a", "b", "c"]
ROUTERS = ["r1", "r2"]
SESSIONS = [f"s{n}" for n in range(6)]


class Policy(RuleBasedStateMachine):
    """Any interleaving of replicas that come and go, sessions, load reports and losses of the whole store."""

    url = ""
    runner: asyncio.Runner
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        Policy.runs += 1
        self.store = self.wait(Store.connect(self.url, f"run{Policy.runs}"))
        self.ready: set[str] = set()
        self.homes: dict[str, str] = {}
        self.open: dict[str, Counter[str]] = {router: Counter() for router in ROUTERS}

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def teardown(self) -> None:
        self.wait(self.store.close())

    @rule(replica=st.sampled_from(REPLICAS), state=st.sampled_from(["ready", "loading", "draining"]))
    def lease(self, replica: str, state: Any) -> None:
        self.wait(self.store.registry.put(Lease(id=replica, role="inference", state=state), 60))
        (self.ready.add if state == "ready" else self.ready.discard)(replica)

    @rule(replica=st.sampled_from(REPLICAS))
    def leave(self, replica: str) -> None:
        self.wait(self.store.registry.drop("inference", replica))
        self.ready.discard(replica)

    @rule(
        session=st.sampled_from([None, *SESSIONS]),
        router=st.sampled_from(ROUTERS),
        exclude=st.sets(st.sampled_from(REPLICAS), max_size=2),
        preferred=st.sampled_from([None, *REPLICAS]),
        ended=st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 2), max_size=2),
    )
    def choose(
        self, session: str | None, router: str, exclude: set[str], preferred: str | None, ended: dict[str, int]
    ) -> None:
        changes = {replica: -min(count, self.open[router][replica]) for replica, count in ended.items()}
        choice = self.wait(
            self.store.sessions.choose(
                session, router=router, ttl=60, load_ttl=60, exclude=exclude, preferred=preferred, changes=changes
            )
        )
        self.open[router].update(changes)
        candidates = self.ready - exclude
        if not candidates:
            assert choice is None
            return
        home = self.homes.get(session) if session else None
        if home in candidates:
            expected = home
        elif home is None and preferred in candidates:
            expected = preferred
        else:
            load = sum(self.open.values(), Counter())
            counts = Counter(self.homes.values())
            expected = min(candidates, key=lambda replica: (load[replica], counts[replica], replica))
        assert choice is not None
        assert (choice.replica, choice.bound) == (expected, home == expected)
        if session:
            self.homes[session] = choice.replica
        self.open[router][choice.replica] += 1

    @rule(session=st.sampled_from(SESSIONS))
    def finish(self, session: str) -> None:
        self.wait(self.store.sessions.finish(session))
        self.homes.pop(session, None)

    @rule(router=st.sampled_from(ROUTERS), open=st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 5)))
    def report(self, router: str, open: dict[str, int]) -> None:
        self.wait(self.store.sessions.report(router, open, ttl=60))
        self.open[router] = Counter(open)

    @rule()
    def wipe(self) -> None:
        self.wait(self.store.redis.flushall())
        self.ready.clear()
        self.homes.clear()
        self.open = {router: Counter() for router in ROUTERS}

    @invariant()
    def load_is_the_sum_of_the_routers(self) -> None:
        total = +sum(self.open.values(), Counter())
        assert self.wait(self.store.sessions.loads()) == total
        assert self.wait(self.store.sessions.loads(but="r1")) == +self.open["r2"]

    @invariant()
    def the_three_structures_agree(self) -> None:
        keys, redis = self.store.keys, self.store.redis
        homes = {k.decode(): v.decode() for k, v in self.wait(redis.hgetall(keys.homes)).items()}
        counts = {k.decode(): int(v) for k, v in self.wait(redis.hgetall(keys.session_counts)).items()}
        members = {member.decode() for member in self.wait(redis.zrange(keys.sessions, 0, -1))}
        assert homes == self.homes
        assert counts == Counter(homes.values())
        assert members == set(homes)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server.url
    server.stop()


def test_the_script_follows_the_policy(redis_url: str) -> None:
    Policy.url = redis_url
    with asyncio.Runner() as Policy.runner:
        run_state_machine_as_test(
            Policy,
            settings=settings(
                max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )


async def test_everything_expires_by_the_server_s_clock(store: Store) -> None:
    await store.registry.put(Lease(id="a", role="inference", address="http://a:1", state="ready"), 0.3)
    assert [lease.id for lease in await store.registry.list("inference")] == ["a"]
    for n in range(100):
        await store.sessions.choose(f"s{n}", router="r", ttl=0.3, load_ttl=0.3)
    assert await store.sessions.loads() == {"a": 100}
    await asyncio.sleep(0.4)
    assert await store.registry.list("inference") == []
    assert await store.sessions.choose("new", router="r", ttl=1, load_ttl=1) is None
    assert await store.sessions.loads() == {}
    assert [key async for key in store.redis.scan_iter()] == []
