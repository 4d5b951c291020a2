"""The ledger's bookkeeping, evaluations, phases and what status says."""

from __future__ import annotations

import msgspec
import pytest

from rollstream.core.bus import Phase
from rollstream.core.bus.subjects import token
from rollstream.core.config import EvalSourceConfig, OrchestratorConfig
from rollstream.core.wire import Array, Branch, OrchestratorState, Rollout, Sampling, VersionSpan
from rollstream.orchestrator.checks import rollout_fault
from rollstream.orchestrator.evals import EvalRun, due_version, eval_groups
from rollstream.orchestrator.groups import GroupInProgress, Received
from rollstream.orchestrator.ledger import Ledger
from rollstream.orchestrator.phases import phase_of
from rollstream.orchestrator.waiting import what_it_waits_for
from support.rollouts import make_branch, make_group, make_rollout


def received(rollout: Rollout, sequence: int) -> Received:
    return Received(f"{rollout.group}.{rollout.member}", sequence, "d", rollout)


def open_eval(ledger: Ledger, version: int = 0, tasks: int = 2) -> EvalRun:
    source = EvalSourceConfig(id="words", num_tasks=tasks, rollouts_per_task=2)
    groups = eval_groups(source, None, version, 1, Sampling(), 0)
    run = EvalRun("words", version, {token(group.group): GroupInProgress(group) for group in groups})
    ledger.evaluating["words"] = run
    return run


def test_low_water_is_the_first_rollout_that_is_not_decided() -> None:
    ledger = Ledger(timeline=1)
    first, second = make_group(0, size=1), make_group(1, size=2)
    ledger.table.add(first)
    entry = ledger.table.add(second)
    ledger.receive(received(make_rollout(first, 0), 4))
    ledger.receive(received(make_rollout(second, 0), 7))
    assert (ledger.position, ledger.low_water()) == (8, 4)
    ledger.table.remove(first.group)
    assert ledger.low_water() == 7
    ledger.drop(entry, stale=True)
    assert ledger.low_water() == 8 and ledger.rejected == ["t1-words-000001.0"] and ledger.dropped_stale == 1


def test_rollouts_of_an_open_evaluation_are_not_purged() -> None:
    ledger = Ledger(timeline=1)
    run = open_eval(ledger)
    group = next(iter(run.groups.values())).group
    assert ledger.receive(received(make_rollout(group, 1, 0.5), 3))
    ledger.position = 20
    assert ledger.low_water() == 3 and run.missing == 3
    assert not ledger.receive(received(make_rollout(make_group(5), 0), 21)), "its group is decided"


def test_state_survives_a_commit() -> None:
    ledger = Ledger(timeline=1, committed=4, cursors={"words": 9}, evals={"words": 3}, position=12)
    ledger.table.add(make_group(8))
    state = ledger.state()
    again = Ledger.restored(1, 4, state)
    assert (again.cursors, again.evals, again.position) == ({"words": 9}, {"words": 3}, 12)
    assert [group.group for group in state.open_groups] == ["t1-words-000008"]
    assert Ledger.restored(1, 0, OrchestratorState()).position == 1


@pytest.mark.parametrize(
    ("newest", "done", "due"),
    [
        (-1, -1, None), (0, -1, 0), (0, 0, None), (4, 0, None), (5, 0, 5), (7, 0, 5), (7, 5, None), (12, 5, 10),
        (13, 10, 13),
    ],
)
def test_evals_come_by_interval_base_model_first_and_last_always(newest: int, done: int, due: int | None) -> None:
    assert due_version(interval=5, newest=newest, done=done, max_steps=13) == due


def test_an_eval_is_complete_with_its_last_rollout_and_counts_failures_apart() -> None:
    ledger = Ledger(timeline=1)
    run = open_eval(ledger, version=5)
    groups = [entry.group for entry in run.groups.values()]
    assert [group.group for group in groups] == ["e5-t1-words-000000", "e5-t1-words-000001"]
    sequence = iter(range(1, 9))
    for group, reward in zip(groups, (1.0, 0.5), strict=True):
        ledger.receive(received(make_rollout(group, 0, reward), next(sequence)))
    ledger.receive(received(make_rollout(groups[0], 1, 0.0), next(sequence)))
    assert not run.complete
    ledger.receive(received(make_rollout(groups[1], 1, error="TaskError"), next(sequence)))
    assert run.complete
    assert run.metrics() == {"reward/mean": 0.5, "avg@2": 0.5, "errored": 0.25}


def test_a_smaller_split_gives_a_smaller_eval() -> None:
    source = EvalSourceConfig(id="words", num_tasks=32)
    assert len(eval_groups(source, 5, 0, 1, Sampling(), 0)) == 5


@pytest.mark.parametrize(
    ("committed", "newest", "evaluated", "phase"),
    [
        (0, -1, True, Phase.STARTING),
        (0, 0, True, Phase.RUNNING),
        (9, 8, True, Phase.RUNNING),
        (10, 9, True, Phase.DRAINING),
        (10, 10, False, Phase.FINALISING),
        (10, 10, True, Phase.DONE),
    ],
)
def test_phase_follows_from_where_the_run_stands(committed: int, newest: int, evaluated: bool, phase: Phase) -> None:
    assert phase_of(committed, newest, 10, evaluated=evaluated) is phase


def waits(ledger: Ledger, *, paused: bool = False, holds: bool = False, **settings: int) -> tuple[str, str]:
    config = OrchestratorConfig(max_steps=10, groups_per_batch=1, **settings)
    found = what_it_waits_for(config, ledger, paused=paused, holds=holds)
    return found.reason, found.detail


def test_status_names_who_is_waited_for_and_the_limit_that_binds() -> None:
    ledger = Ledger(timeline=1)
    assert waits(ledger)[0] == "base_weights"
    ledger.newest = 0
    ledger.binding = "max_off_policy_steps"
    reason, detail = waits(ledger)
    assert reason == "rollouts" and "env workers" in detail and "max_off_policy_steps" in detail
    assert waits(ledger, paused=True)[0] == "paused"
    open_eval(ledger)
    reason, detail = waits(ledger, holds=True)
    assert reason == "evaluation" and "4 episodes" in detail
    ledger.committed = 2
    ledger.table.add(make_group(0, size=1))
    ledger.receive(received(make_rollout(make_group(0, size=1), 0), 1))
    reason, detail = waits(ledger)
    assert reason == "max_lead" and "v0, needs v1" in detail
    ledger.committed, ledger.newest = 10, 9
    assert waits(ledger)[0] == "last_version"
    ledger.newest = 10
    assert waits(ledger)[0] == "evaluation"


def faulty(**changes: object) -> Branch:
    return msgspec.structs.replace(make_branch(), **changes)


@pytest.mark.parametrize(
    ("branch", "fault"),
    [
        (make_branch(), None),
        (make_branch(sampled=0), None),
        (faulty(spans=()), "not its sampled tokens"),
        (faulty(spans=(VersionSpan(timeline=1, version=0, start=3, end=9),)), "outside its 7 tokens"),
        (faulty(spans=(VersionSpan(timeline=1, version=0, start=2, end=7),)), "not its sampled tokens"),
        (faulty(spans=(VersionSpan(timeline=1, version=0, start=3, end=7),) * 2), "not its sampled tokens"),
        (faulty(logprobs=Array.of([float("nan")] * 7, "<f4")), "no valid logprob"),
        (faulty(logprobs=Array.of([0.0] * 6, "<f4")), "differ in shape"),
        (faulty(logprobs=Array(dtype="<f4", shape=(7,), data=b"123")), "wants 28 bytes"),
        (faulty(temperature=0.0), "not positive"),
    ],
)
def test_rollouts_from_elsewhere_are_checked(branch: Branch, fault: str | None) -> None:
    group = make_group(size=1)
    found = rollout_fault(make_rollout(group, 0, branches=[branch]))
    assert found is None if fault is None else found is not None and fault in found


def test_a_reward_that_is_no_number_is_a_fault_unless_the_rollout_failed() -> None:
    group = make_group(size=1)
    assert "not a finite number" in (rollout_fault(make_rollout(group, 0, float("inf"))) or "")
    assert "not a finite number" in (rollout_fault(make_rollout(group, 0, None)) or "")
    assert rollout_fault(make_rollout(group, 0, error="TaskError")) is None
