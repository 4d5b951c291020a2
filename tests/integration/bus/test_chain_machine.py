"""Two orchestrators, crashes, lost acknowledgements, retries and rewinds on a real COMMITS stream: no double use."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from nats.js.api import StorageType

from rollstream.cli.servers import EmbeddedNats
from rollstream.core.bus import Bus, CommitChain, StaleWriter, StreamSettings, commit_of
from rollstream.core.wire import Batch, Epoch, OrchestratorState, Rewind, encode
from support.chains import next_batch

T = TypeVar("T")
WRITERS = st.sampled_from(["a", "b"])


class ChainMachine(RuleBasedStateMachine):
    """Each writer holds the chain as it last saw it, possibly stale; the server is real."""

    url: ClassVar[str] = ""
    loop: ClassVar[asyncio.AbstractEventLoop]

    def go(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    @initialize()
    def connect(self) -> None:
        self.bus = self.go(Bus.connect(self.url, uuid.uuid4().hex[:10], name="machine"))
        self.go(self.bus.create_streams(StreamSettings(storage=StorageType.MEMORY, max_bytes=1 << 26)))
        self.writers: dict[str, CommitChain] = {}
        self.leader: str | None = None

    def teardown(self) -> None:
        if hasattr(self, "bus"):
            self.go(self.check())
            self.go(self.bus.delete_streams())
            self.go(self.bus.close())

    @rule(name=WRITERS)
    def start(self, name: str) -> None:
        """A (re)started orchestrator takes the chain, whoever held it."""
        chain = self.go(self.bus.chain())
        self.go(chain.take(name))
        self.writers[name], self.leader = chain, name

    @rule(name=WRITERS)
    def commit(self, name: str) -> None:
        self.attempt(name, lambda chain: next_batch(chain))

    @rule(name=WRITERS, back=st.integers(0, 4))
    def rewind(self, name: str, back: int) -> None:
        self.attempt(name, lambda chain: self.rewound(chain, max(0, chain.head.step - back)))

    def rewound(self, chain: CommitChain, step: int) -> Rewind:
        fields = chain.batch_fields() | {"timeline": chain.head.timeline + 1}
        return Rewind(parent=chain.head.timeline, from_step=step, state=OrchestratorState(), **fields)  # type: ignore[arg-type]

    def attempt(self, name: str, build: Any) -> None:
        chain = self.writers.get(name)
        if chain is None:
            return
        if name == self.leader:
            self.go(chain.append(build(chain)))
            return
        before = self.go(self.bus.last_sequence("COMMITS"))
        with pytest.raises(StaleWriter):
            self.go(chain.append(build(chain)))
        assert self.go(self.bus.last_sequence("COMMITS")) == before
        del self.writers[name]  # it exits

    @precondition(lambda self: self.leader in self.writers)
    @rule(crash=st.booleans())
    def lose_the_acknowledgement(self, crash: bool) -> None:
        """The server has the record, the writer does not know: it retries, or dies and starts again."""
        assert self.leader is not None
        chain = self.writers[self.leader]
        batch = next_batch(chain)
        self.go(self.bus.js.publish(self.bus.subjects.commits, encode(batch)))  # type: ignore[arg-type]
        if crash:
            self.start(self.leader)
            assert self.writers[self.leader].head.step == batch.step
        else:
            self.go(chain.append(batch))

    @precondition(lambda self: bool(self.writers))
    @rule(name=WRITERS)
    def crash(self, name: str) -> None:
        self.writers.pop(name, None)

    async def check(self) -> None:
        """Walk the raw stream: within the lineage every step stands once and no rollout is used twice."""
        last = await self.bus.last_sequence("COMMITS")
        lineage: list[Batch] = []
        epoch = 0
        for sequence in range(1, last + 1):
            message = await self.bus.js.get_msg(self.bus.subjects.stream("COMMITS"), sequence)
            record = commit_of(self.bus.stored("commits", sequence, message.data or b""))
            if isinstance(record, Epoch):
                assert record.epoch == epoch + 1
                epoch = record.epoch
            elif isinstance(record, Rewind):
                lineage = lineage[: record.from_step]
            else:
                assert record.epoch == epoch
                lineage.append(record)
        assert [batch.step for batch in lineage] == list(range(1, len(lineage) + 1))
        used = [sample.subject for batch in lineage for sample in batch.samples]
        assert len(used) == len(set(used))
        reader = self.bus.chain_reader()
        for batch in lineage:
            found = await reader.next(5.0)
            assert found is not None
            assert found[1] == batch
        assert await reader.next(0.05) is None
        await reader.close()


@pytest.fixture
def machine_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def test_no_double_use(tmp_path: Path, machine_loop: asyncio.AbstractEventLoop) -> None:
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    try:
        ChainMachine.url, ChainMachine.loop = server.url, machine_loop
        run_state_machine_as_test(
            ChainMachine,
            settings=settings(
                max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        server.stop()
