"""The session script against a plain Python model, on a real server: every choice, load and binding agrees."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rollstream.cli.servers import EmbeddedRedis
from rollstream.core.store import Choice, Lease, Store
from rollstream.core.store.registry import State

T = TypeVar("T")

SESSIONS = st.sampled_from(["s0", "s1", "s2", "s3", "a|b:{c}", None])
ROUTERS = st.sampled_from(["r0", "r1"])
REPLICAS = ["a", "b", "c"]
LONG, SHORT = 60.0, 0.002
"""Seconds to live: longer than an example takes, and over once :meth:`Machine._elapse` has slept."""

_runs = itertools.count()


class Model:
    """What ``sticky_least_loaded`` means, in dictionaries."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.homes: dict[str, str] = {}
        self.open: dict[str, Counter[str]] = defaultdict(Counter)

    def load(self, replica: str) -> int:
        return sum(open[replica] for open in self.open.values())

    def change(self, router: str, replica: str, by: int) -> None:
        self.open[router][replica] = max(0, self.open[router][replica] + by)

    def choose(
        self, session: str | None, router: str, exclude: set[str], preferred: str | None, changes: dict[str, int]
    ) -> Choice | None:
        for replica, by in changes.items():
            self.change(router, replica, by)
        candidates = sorted(self.ready - exclude)
        if not candidates:
            return None
        home = self.homes.get(session) if session else None
        sessions = Counter(self.homes.values())
        if home in candidates:
            chosen = str(home)
        elif home is None and preferred in candidates:
            chosen = str(preferred)
        else:
            chosen = min(candidates, key=lambda id: (self.load(id), sessions[id], id))
        if session:
            self.homes[session] = chosen
        self.change(router, chosen, +1)
        return Choice(chosen, bound=home == chosen)


class Machine(RuleBasedStateMachine):
    """One fresh run on the shared server."""

    def __init__(self, runner: asyncio.Runner, connection: Store) -> None:
        super().__init__()
        self._runner = runner
        self.store = Store(connection.redis, f"model-{next(_runs)}")
        self.model = Model()

    def _do(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.get_loop().run_until_complete(call)

    def _elapse(self) -> None:
        time.sleep(3 * SHORT)

    @initialize()
    def all_are_ready(self) -> None:
        for replica in REPLICAS:
            self.replica_beats(replica, "ready")

    @rule(replica=st.sampled_from(REPLICAS), state=st.sampled_from(["ready", "ready", "draining"]))
    def replica_beats(self, replica: str, state: State) -> None:
        self._do(self.store.registry.put(Lease(id=replica, role="inference", state=state), LONG))
        (self.model.ready.add if state == "ready" else self.model.ready.discard)(replica)

    @precondition(lambda self: len(self.model.ready) > 1)
    @rule(replica=st.sampled_from(REPLICAS), dies=st.booleans())
    def replica_goes(self, replica: str, dies: bool) -> None:
        if dies:
            self._do(self.store.registry.put(Lease(id=replica, role="inference", state="ready"), SHORT))
            self._elapse()
        else:
            self._do(self.store.registry.drop("inference", replica))
        self.model.ready.discard(replica)

    @rule(
        sessions=st.lists(SESSIONS, min_size=3, max_size=8), router=ROUTERS,
        preferred=st.none() | st.sampled_from(REPLICAS),
    )  # fmt: skip
    def several_arrive(self, sessions: list[str | None], router: str, preferred: str | None) -> None:
        for session in sessions:
            self._choose(session, router, set(), preferred, {}, None)

    @rule(sessions=st.lists(SESSIONS, min_size=2, max_size=5))
    def several_leave(self, sessions: list[str | None]) -> None:
        for session in sessions:
            self.finish(session)

    @rule(
        session=SESSIONS, router=ROUTERS, exclude=st.sets(st.sampled_from(REPLICAS), max_size=3),
        preferred=st.none() | st.sampled_from(REPLICAS),
        changes=st.dictionaries(st.sampled_from(REPLICAS), st.integers(-2, 2), max_size=2),
        brief=st.sampled_from([None, None, None, "session", "load"]),
    )  # fmt: skip
    def choose(
        self, session: str | None, router: str, exclude: set[str], preferred: str | None, changes: dict[str, int],
        brief: str | None,
    ) -> None:  # fmt: skip
        self._choose(session, router, exclude, preferred, changes, brief)

    def _choose(
        self, session: str | None, router: str, exclude: set[str], preferred: str | None, changes: dict[str, int],
        brief: str | None,
    ) -> None:  # fmt: skip
        chosen = self._do(
            self.store.sessions.choose(
                session,
                router=router,
                exclude=exclude,
                preferred=preferred,
                changes=changes,
                ttl=SHORT if brief == "session" else LONG,
                load_ttl=SHORT if brief == "load" else LONG,
            )
        )
        assert chosen == self.model.choose(session, router, exclude, preferred, changes)
        if brief is not None:
            self._elapse()
        if brief == "session" and session and chosen is not None:
            del self.model.homes[session]
        if brief == "load" and (changes or chosen is not None):
            self.model.open.pop(router, None)

    @rule(session=SESSIONS)
    def finish(self, session: str | None) -> None:
        self._do(self.store.sessions.finish(session or "never-opened"))
        self.model.homes.pop(session or "", None)

    @rule(
        router=ROUTERS, dies=st.sampled_from([False, False, True]),
        open=st.dictionaries(st.sampled_from(REPLICAS), st.integers(1, 2), min_size=1),
    )  # fmt: skip
    def router_reports(self, router: str, open: dict[str, int], dies: bool) -> None:
        self._do(self.store.sessions.report(router, open, ttl=SHORT if dies else LONG))
        self.model.open[router] = Counter(open)
        if dies:
            self._elapse()
            del self.model.open[router]

    @rule()
    def routers_are_idle(self) -> None:
        for router in ("r0", "r1"):
            self._do(self.store.sessions.report(router, {}, ttl=LONG))
        self.model.open.clear()

    @precondition(lambda self: len(self.model.homes) > 3)
    @rule()
    def wiped(self) -> None:
        async def wipe() -> None:
            await self.store.redis.flushall()
            await self.store.redis.script_flush()

        self._do(wipe())
        self.model = Model()
        self.all_are_ready()

    @invariant()
    def everything_agrees(self) -> None:
        loads = self._do(self.store.sessions.loads())  # takes away what has expired
        assert {id: open for id, open in loads.items() if open} == {
            id: self.model.load(id) for id in REPLICAS if self.model.load(id)
        }
        keys, redis = self.store.keys, self.store.redis
        homes = self._do(redis.hgetall(keys.homes))
        assert {session.decode(): home.decode() for session, home in homes.items()} == self.model.homes
        counts = self._do(redis.hgetall(keys.session_counts))
        assert {id.decode(): int(count) for id, count in counts.items()} == Counter(self.model.homes.values())
        assert {session.decode() for session in self._do(redis.zrange(keys.sessions, 0, -1))} == set(self.model.homes)

    def teardown(self) -> None:
        """Everything released: not one key of the run is left."""

        async def release() -> list[bytes]:
            for session in list(self.model.homes):
                await self.store.sessions.finish(session)
            for router in ("r0", "r1"):
                await self.store.sessions.report(router, {}, ttl=LONG)
            for replica in REPLICAS:
                await self.store.registry.drop("inference", replica)
            return [key async for key in self.store.redis.scan_iter(match=self.store.keys.prefix + "*")]

        assert self._do(release()) == []


@pytest.fixture
def runner(redis_server: EmbeddedRedis) -> Iterator[tuple[asyncio.Runner, Store]]:
    with asyncio.Runner() as runner:
        store = runner.run(Store.connect(redis_server.url, "model", connect_timeout=10))
        yield runner, store
        runner.run(store.close())


def test_the_script_follows_the_model(runner: tuple[asyncio.Runner, Store]) -> None:
    run_state_machine_as_test(
        lambda: Machine(*runner),
        settings=settings(
            max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
