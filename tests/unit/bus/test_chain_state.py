"""The commit chain as a state machine without I/O: two orchestrators, crashes, lost acknowledgements, retries,
rewinds, purges, and trainers that read and restart meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollstream.core.bus import ChainBroken, ChainHead, ChainRewound, Lineage
from rollstream.core.bus.chain_state import follow, violation
from rollstream.core.wire import Array, Batch, CommitRecord, Epoch, OrchestratorState, Rewind, Sample, digest, encode

WRITERS = st.sampled_from(["a", "b"])
PER_BATCH = 2


def fields(head: ChainHead) -> dict[str, object]:
    return {"timeline": head.timeline, "epoch": head.epoch, "created": 0, "previous": head.digest}


def epoch_after(head: ChainHead, writer: str = "w") -> Epoch:
    return Epoch(writer=writer, **(fields(head) | {"epoch": head.epoch + 1}))  # type: ignore[arg-type]


def batch_after(head: ChainHead) -> Batch:
    """Uses the next rollouts that the state as of ``head`` has not used, as an orchestrator does."""
    first = head.state.cursors.get("s", 0)
    samples = tuple(
        Sample(subject=f"t{head.timeline}.r{index}", digest="d", branch=0, advantages=Array.of([0.0], "f4"))
        for index in range(first, first + PER_BATCH)
    )
    state = OrchestratorState(cursors={"s": first + PER_BATCH})
    return Batch(step=head.step + 1, version=head.step, samples=samples, state=state, **fields(head))  # type: ignore[arg-type]


def rewind_after(head: ChainHead, step: int, cursor: int = 0) -> Rewind:
    """A new timeline has groups of its own, so its cursor may begin at 0."""
    new = fields(head) | {"timeline": head.timeline + 1}
    return Rewind(parent=head.timeline, from_step=step, state=OrchestratorState(cursors={"s": cursor}), **new)  # type: ignore[arg-type]


@dataclass
class Log:
    """COMMITS as the server keeps it: an append names the last sequence it knows, or is refused."""

    records: list[CommitRecord]
    first: int = 1

    @property
    def last(self) -> int:
        return len(self.records)

    def append(self, record: CommitRecord, expected: int) -> int | None:
        if expected != self.last:
            return None
        self.records.append(record)
        return self.last

    def since(self, seq: int) -> list[tuple[int, CommitRecord]]:
        start = max(seq, self.first)
        return [(at, self.records[at - 1]) for at in range(start, self.last + 1)]


class Writer:
    """An orchestrator: the head as it last saw it, possibly stale."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.head = ChainHead()
        self.catch_up()

    def catch_up(self) -> None:
        for seq, record in self.log.since(self.head.seq + 1):
            self.head = follow(self.head, record, seq, digest(encode(record)))

    def append(self, record: CommitRecord, *, acknowledged: bool = True) -> bool:
        """Whether it stands. A refused append reads back: equal bytes are its own whose acknowledgement was lost."""
        assert violation(self.head, record) is None
        seq = self.log.append(record, self.head.seq)
        if seq is not None and not acknowledged:
            return self.append(record)  # the retry meets its own record
        if seq is None:
            behind = self.log.since(self.head.seq + 1)
            if encode(behind[0][1]) != encode(record):
                return False
            seq = behind[0][0]
        self.head = follow(self.head, record, seq, digest(encode(record)))
        return True


@dataclass(frozen=True)
class Checkpoint:
    """What a trainer has trained, batch by batch, and where that stands."""

    trained: tuple[Batch, ...]
    timeline: int


class Trainer:
    """Reads the chain in slices of any size; ``trained`` is what its weights are made of."""

    def __init__(self, log: Log, start: Checkpoint) -> None:
        self.log = log
        self.trained = list(start.trained)
        self.timeline = start.timeline
        self.lineage: Lineage[int] = Lineage(len(start.trained), start.timeline)
        self.position = 1
        self.end = log.last

    def read(self, limit: int) -> None:
        try:
            for seq, record in self.log.since(self.position)[:limit]:
                self.lineage.accept(record, seq, digest(encode(record)), seq)
                self.position = seq + 1
        except ChainBroken:
            if not 0 < self.lineage.head.seq < self.log.first - 1:
                raise
            event("a purge overtook a trainer")
            self.lineage.restart()
            self.position = 1

    def train(self, limit: int) -> None:
        while limit and self.position > self.end and (taken := self.lineage.take()):
            seq, batch = taken
            assert self.log.records[seq - 1] == batch
            self.trained.append(batch)
            self.timeline = batch.timeline
            limit -= 1


class ChainMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.log = Log([])
        self.writers: dict[str, Writer] = {}
        self.leader: str | None = None
        self.checkpoints = [Checkpoint((), 1)]
        self.trainer: Trainer | None = None
        self.start("a", acknowledged=True)
        self.restart_trainer(0)

    def lineage(self) -> list[Batch]:
        """By definition, from the whole log, purged or not."""
        batches: list[Batch] = []
        for record in self.log.records:
            if isinstance(record, Batch):
                batches.append(record)
            elif isinstance(record, Rewind):
                del batches[record.from_step :]
        return batches

    # --- orchestrators ---------------------------------------------------------------------------------------------

    @rule(name=WRITERS, acknowledged=st.booleans())
    def start(self, name: str, acknowledged: bool) -> None:
        writer = Writer(self.log)
        assert writer.append(epoch_after(writer.head, name), acknowledged=acknowledged)
        self.writers[name], self.leader = writer, name

    @rule(name=WRITERS)
    def race_to_start(self, name: str) -> None:
        """Both have read the same head; one epoch is refused, its writer reads on and takes the chain after all."""
        one, other = Writer(self.log), Writer(self.log)
        assert one.append(epoch_after(one.head, "x"))
        assert not other.append(epoch_after(other.head, name))
        other.catch_up()
        assert other.append(epoch_after(other.head, name))
        assert not one.append(batch_after(one.head))
        self.writers[name], self.leader = other, name

    @rule(count=st.integers(1, 4), acknowledged=st.booleans())
    def lead_on(self, count: int, acknowledged: bool) -> None:
        """Whoever leads commits; when it has died, another one is started."""
        if self.leader not in self.writers:
            self.start("b", acknowledged)
        for _ in range(count):
            self.attempt(str(self.leader), batch_after, acknowledged)

    @rule(name=WRITERS, acknowledged=st.booleans())
    def commit(self, name: str, acknowledged: bool) -> None:
        self.attempt(name, batch_after, acknowledged)

    @rule(name=WRITERS, back=st.integers(0, 4), acknowledged=st.booleans())
    def rewind(self, name: str, back: int, acknowledged: bool) -> None:
        self.attempt(name, lambda head: rewind_after(head, max(0, head.step - back)), acknowledged)

    def attempt(self, name: str, build: Callable[[ChainHead], CommitRecord], acknowledged: bool) -> None:
        writer = self.writers.get(name)
        if writer is None:
            return
        before = self.log.last
        stands = writer.append(build(writer.head), acknowledged=acknowledged)
        assert stands == (name == self.leader)
        if not stands:
            event("a stale writer was refused")
            assert self.log.last == before
            del self.writers[name]

    @rule(name=WRITERS, wrote=st.booleans())
    def crash(self, name: str, wrote: bool) -> None:
        """Between the publish and its acknowledgement, or before the publish."""
        writer = self.writers.pop(name, None)
        if writer is not None and wrote:
            self.log.append(batch_after(writer.head), writer.head.seq)

    # --- trainers --------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 9))
    def restart_trainer(self, which: int) -> None:
        self.trainer = Trainer(self.log, self.checkpoints[-1 - which % len(self.checkpoints)])

    @precondition(lambda self: self.trainer is not None)
    @rule(limit=st.integers(1, 12), steps=st.integers(0, 4))
    def read_and_train(self, limit: int, steps: int) -> None:
        assert self.trainer is not None
        try:
            self.trainer.read(limit)
            self.trainer.train(steps)
        except (ChainBroken, ChainRewound) as stop:
            event(f"a trainer ended: {type(stop).__name__}")
            self.justify(self.trainer)
            self.trainer = None

    def justify(self, trainer: Trainer) -> None:
        """A trainer may only end when it stands on void steps, or a purge took the step or the rewind that it needs."""
        lineage = self.lineage()
        trained = len(trainer.trained)
        if trainer.trained != lineage[:trained]:
            event("because its steps are void")
            return
        next_is_purged = trained < len(lineage) and self.log.records.index(lineage[trained]) + 1 < self.log.first
        link_is_purged = self.log.records[self.log.first - 1].timeline > trainer.timeline
        assert next_is_purged or link_is_purged
        event("because of a purge")

    @precondition(lambda self: self.trainer is not None and self.trainer.trained)
    @rule(purge=st.booleans())
    def checkpoint(self, purge: bool) -> None:
        assert self.trainer is not None
        trainer = self.trainer
        self.checkpoints.append(Checkpoint(tuple(trainer.trained), trainer.timeline))
        if purge and trainer.trained == self.lineage()[: len(trainer.trained)]:
            self.log.first = max(self.log.first, self.log.records.index(trainer.trained[-1]) + 1)

    @rule()
    def read_to_the_end(self) -> None:
        """A trainer that has seen the whole chain and was not stopped has exactly the lineage."""
        if self.trainer is None:
            self.restart_trainer(0)
        assert self.trainer is not None
        try:
            self.trainer.read(1000)
            self.trainer.train(1000)
        except (ChainBroken, ChainRewound):
            self.justify(self.trainer)
            self.trainer = None
            return
        if self.trainer.position > self.trainer.end:
            lineage = self.lineage()
            assert self.trainer.trained == lineage
            used = [sample.subject for batch in self.trainer.trained for sample in batch.samples]
            assert len(used) == len(set(used)), "a rollout was trained twice"

    @precondition(lambda self: len(self.checkpoints) > 1)
    @rule()
    def the_newest_checkpoint_of_the_lineage_can_go_on(self) -> None:
        """Unless somebody went back below what a later checkpoint has purged."""
        lineage = self.lineage()
        good = [point for point in self.checkpoints if list(point.trained) == lineage[: len(point.trained)]]
        best = max(good, key=lambda point: len(point.trained))
        trainer = Trainer(self.log, best)
        try:
            trainer.read(1000)
            trainer.train(1000)
        except (ChainBroken, ChainRewound):
            # Gone back to a step between two checkpoints after the later one had purged what lies there.
            event("the newest checkpoint cannot go on")
            self.justify(trainer)
            return
        assert trainer.trained == lineage

    # --- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def steps_stand_once_and_no_rollout_is_used_twice(self) -> None:
        if not hasattr(self, "log"):
            return
        lineage = self.lineage()
        assert [batch.step for batch in lineage] == list(range(1, len(lineage) + 1))
        used = [sample.subject for batch in lineage for sample in batch.samples]
        assert len(used) == len(set(used))

    @invariant()
    def the_chain_is_one(self) -> None:
        previous, epoch = "", 0
        for record in getattr(self, "log", Log([])).records:
            assert record.previous == previous
            assert record.epoch == (epoch + 1 if isinstance(record, Epoch) else epoch), "a stale epoch has written"
            previous, epoch = digest(encode(record)), record.epoch


TestChainMachine = ChainMachine.TestCase
TestChainMachine.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)


# --- by example ------------------------------------------------------------------------------------------------------


def chain_of(*steps: str) -> list[CommitRecord]:
    """A valid chain: "e" an epoch, "b" a batch, a digit a rewind to that step."""
    head, records = ChainHead(), []
    for seq, kind in enumerate(steps, 1):
        record: CommitRecord
        if kind == "e":
            record = epoch_after(head)
        else:
            record = batch_after(head) if kind == "b" else rewind_after(head, int(kind))
        head = follow(head, record, seq, digest(encode(record)))
        records.append(record)
    return records


def read(records: list[CommitRecord], *, first: int = 1, last: int = 0, timeline: int = 1) -> list[tuple[int, int]]:
    """(timeline, step) of what a reader takes when everything below ``first`` was purged."""
    lineage: Lineage[None] = Lineage(last, timeline)
    for seq, record in enumerate(records, 1):
        if seq >= first:
            lineage.accept(record, seq, digest(encode(record)), None)
    taken = []
    while found := lineage.take():
        taken.append((found[1].timeline, found[1].step))
    return taken


def test_a_reader_skips_what_a_rewind_made_void() -> None:
    chain = chain_of(*"ebbb", "1", *"bbe", "2", "b")
    assert read(chain) == [(1, 1), (2, 2), (3, 3)]
    assert read(chain, last=2, timeline=2) == [(3, 3)]


@pytest.mark.parametrize(("last", "timeline"), [(2, 1), (3, 1), (3, 2)])
def test_a_reader_on_void_steps_is_told(last: int, timeline: int) -> None:
    with pytest.raises(ChainRewound, match=f"stands at step {last}"):
        read(chain_of(*"ebbb", "1", *"bbe", "2", "b"), last=last, timeline=timeline)


def test_a_reader_on_void_steps_is_told_though_the_rewind_is_purged() -> None:
    chain = chain_of(*"ebbbbb", "2", *"bbbb")
    assert read(chain, first=10, last=5, timeline=2) == [(2, 6)]
    with pytest.raises(ChainRewound, match="begins on timeline 2"):
        read(chain, first=10, last=5, timeline=1)


@pytest.mark.parametrize(("last", "timeline"), [(2, 2), (4, 1), (9, 1)])
def test_a_chain_older_than_the_checkpoint_is_refused(last: int, timeline: int) -> None:
    with pytest.raises(ChainBroken, match="the chain ends at step 3 of timeline 1"):
        read(chain_of(*"ebbb"), last=last, timeline=timeline)


def test_an_empty_chain_is_waited_for() -> None:
    assert read([]) == read([], last=5, timeline=2) == read(chain_of("e")) == []


def test_purged_steps_are_missed() -> None:
    with pytest.raises(ChainBroken, match="expected step 1 on COMMITS, found step 2"):
        read(chain_of(*"ebbb"), first=3)


def test_a_rewind_to_a_purged_step_is_not_waited_out() -> None:
    chain = chain_of(*"ebb", "1")
    assert read(chain, first=3, last=1) == []
    with pytest.raises(ChainBroken, match="expected step 1 on COMMITS, found a rewind to step 1"):
        read(chain, first=3)


def test_a_purge_that_overtakes_a_reader_makes_it_begin_again() -> None:
    chain = chain_of(*"ebbbb")
    lineage: Lineage[int] = Lineage(3, 1)
    for seq in (1, 2, 3):
        lineage.accept(chain[seq - 1], seq, digest(encode(chain[seq - 1])), seq)
    with pytest.raises(ChainBroken, match="its previous"):
        lineage.accept(chain[4], 5, digest(encode(chain[4])), 5)
    lineage.restart()
    for seq in (4, 5):
        lineage.accept(chain[seq - 1], seq, digest(encode(chain[seq - 1])), seq)
    assert lineage.take() == (5, chain[4])
    assert lineage.take() is None


def test_what_was_accepted_before_a_purge_is_not_taken_after_it() -> None:
    chain = chain_of(*"ebbbb")
    lineage: Lineage[int] = Lineage(1, 1)
    for seq in (1, 2, 3):
        lineage.accept(chain[seq - 1], seq, digest(encode(chain[seq - 1])), seq)
    lineage.restart()
    lineage.accept(chain[4], 5, digest(encode(chain[4])), 5)
    with pytest.raises(ChainBroken, match="expected step 2 on COMMITS, found step 4"):
        lineage.take()


def test_an_epoch_and_a_rewind_hand_the_right_state_on() -> None:
    head = ChainHead()
    for seq, record in enumerate(chain_of(*"ebbe"), 1):
        head = follow(head, record, seq, digest(encode(record)))
    assert (head.step, head.epoch, head.state.cursors) == (2, 2, {"s": 2 * PER_BATCH})
    back = rewind_after(head, 1, cursor=7)
    head = follow(head, back, 5, "x")
    assert (head.step, head.timeline, head.epoch, head.state.cursors) == (1, 2, 2, {"s": 7})


def test_an_epoch_without_the_batch_before_it_is_no_beginning() -> None:
    chain = chain_of(*"ebbe")
    assert read(chain, first=3, last=2) == []
    with pytest.raises(ChainBroken, match="state of the run"):
        read(chain, first=4, last=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"previous": "00"}, "its previous"),
        ({"epoch": 2}, "written by epoch 2"),
        ({"timeline": 2}, "timeline 2"),
        ({"step": 4}, "step 4 after step 2"),
        ({"step": 2}, "step 2 after step 2"),
        ({"version": 1}, "trains on v1"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(changes: dict[str, object], message: str) -> None:
    head = ChainHead()
    for seq, record in enumerate(chain_of(*"ebb"), 1):
        head = follow(head, record, seq, digest(encode(record)))
    wrong = msgspec.structs.replace(batch_after(head), **changes)
    assert message in (violation(head, wrong) or "")
    with pytest.raises(ChainBroken, match=r"COMMITS 9 \(Batch\)"):
        follow(head, wrong, 9, "x")
