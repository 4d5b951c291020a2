"""The table of undecided groups, and the order of tasks."""

from __future__ import annotations

import collections

import pytest

from rollstream.core.wire import Rollout
from rollstream.orchestrator.groups import GroupTable, Received
from rollstream.orchestrator.scores import eval_scores, pass_at_k, pass_hat_k, solve_rates
from rollstream.orchestrator.sources import TaskOrder, next_source
from support.rollouts import make_branch, make_group, make_rollout


def received(rollout: Rollout, sequence: int) -> Received:
    return Received(f"rollouts.{rollout.group}.{rollout.member}", sequence, "d" * 64, rollout)


def test_a_group_is_complete_when_every_member_has_one_rollout() -> None:
    table = GroupTable()
    group = make_group(size=2)
    table.add(group)
    assert table.receive(received(make_rollout(group, 1), 5)) is not None
    assert table.ready() == [] and table.episodes == 1
    table.receive(received(make_rollout(group, 1, 0.25), 6))
    assert table.ready() == [], "a member counts once"
    table.receive(received(make_rollout(group, 0), 7))
    (entry,) = table.ready()
    assert [member.rollout.reward for member in entry.usable] == [1.0, 1.0]
    assert table.low_water(8) == 5
    table.remove(group.group)
    assert table.low_water(8) == 8 and len(table) == 0


def test_rollouts_of_decided_groups_are_ignored_and_foreign_members_refused() -> None:
    table = GroupTable()
    group = make_group(size=2)
    assert table.receive(received(make_rollout(group, 0), 1)) is None
    table.add(group)
    with pytest.raises(ValueError, match="has 2 members"):
        table.receive(received(make_rollout(group, 2), 1))


def test_errored_and_empty_members_are_left_out_of_the_baseline() -> None:
    table = GroupTable()
    group = make_group(size=4)
    entry = table.add(group)
    table.receive(received(make_rollout(group, 0, error="ProviderError"), 1))
    table.receive(received(make_rollout(group, 1, branches=[make_branch(sampled=0)]), 2))
    table.receive(received(make_rollout(group, 2, branches=[make_branch(trainable=False)]), 3))
    assert not entry.complete
    table.receive(received(make_rollout(group, 3), 4))
    assert [member.rollout.member for member in entry.usable] == [3]
    assert table.ready() == [entry] and table.failed() == []


def test_a_group_without_a_usable_member_has_failed_and_says_why() -> None:
    table = GroupTable()
    group = make_group(size=1)
    table.add(group)
    table.receive(received(make_rollout(group, 0, error="TaskError"), 1))
    (entry,) = table.failed()
    assert entry.last_error == "TaskError: it broke" and table.ready() == []


def test_ready_groups_come_oldest_policy_first_and_stale_ones_are_named() -> None:
    table = GroupTable()
    for index, version in enumerate([3, 1, 2]):
        group = make_group(index, size=1)
        table.add(group)
        table.receive(received(make_rollout(group, 0, version=version), index + 1))
    assert [entry.group.task for entry in table.ready()] == [1, 2, 0]
    assert [entry.group.task for entry in table.stale(5, 2)] == [1]
    assert table.stale(4, 2) == []


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    group = make_group(size=1)
    table = GroupTable()
    entry = table.add(group)
    branch = make_branch(2, 4, spans=[(3, 2, 4), (5, 4, 6)])
    table.receive(received(make_rollout(group, 0, branches=[branch]), 1))
    assert entry.oldest == 3 and entry.usable[0].newest == 5


def test_tasks_are_drawn_once_an_epoch_in_an_order_that_only_the_seed_decides() -> None:
    order = TaskOrder("words", 10, seed=3)
    drawn = [order.task(position) for position in range(30)]
    assert all(sorted(drawn[start : start + 10]) == list(range(10)) for start in (0, 10, 20))
    assert drawn[:10] != drawn[10:20]
    assert drawn == [TaskOrder("words", 10, seed=3).task(position) for position in range(30)]
    assert drawn != [TaskOrder("words", 10, seed=4).task(position) for position in range(30)]
    assert TaskOrder("words", 10, seed=3).task(25) == drawn[25], "a restart needs no history"
    assert [TaskOrder("endless", None, 0).task(position) for position in (0, 7)] == [0, 7]
    with pytest.raises(ValueError, match="no tasks"):
        TaskOrder("words", 0, seed=3)


def test_sources_share_the_groups_by_their_ratios() -> None:
    cursors: dict[str, int] = collections.defaultdict(int)
    for _ in range(400):
        cursors[next_source(cursors, [("a", 3.0), ("b", 1.0)])] += 1
    assert cursors == {"a": 300, "b": 100}


def test_pass_reference_values() -> None:
    assert [pass_at_k(4, 2, k) for k in (1, 2, 4)] == pytest.approx([0.5, 5 / 6, 1.0])
    assert [pass_hat_k(4, 2, k) for k in (2, 4)] == pytest.approx([1 / 6, 0.0])
    assert [pass_at_k(8, 1, k) for k in (1, 2, 4, 8)] == pytest.approx([0.125, 0.25, 0.5, 1.0])
    assert [pass_at_k(8, 3, k) for k in (2, 4)] == pytest.approx([0.642857142857, 0.928571428571])
    assert pass_hat_k(8, 3, 2) == pytest.approx(0.107142857143)


def test_eval_scores_exist_as_far_as_the_rewards_allow() -> None:
    scores = eval_scores({0: [1.0, 0.0, 1.0, 0.0], 1: [0.0, 0.0, 0.0, 0.0]})
    assert scores["reward/mean"] == scores["avg@4"] == 0.25
    assert scores["pass@2"] == pytest.approx(5 / 12) and scores["pass^2"] == pytest.approx(1 / 12)
    assert set(eval_scores({0: [0.5, 0.1]})) == {"reward/mean", "avg@2"}
    assert eval_scores({0: []}) == {}


def test_solve_rates_reference_values() -> None:
    assert solve_rates([[1, 1], [0, 0], [1, 0], [0, 1]]) == {"all": 0.25, "none": 0.25, "some": 0.5}
    assert solve_rates([[0.5, 1]]) == {}
