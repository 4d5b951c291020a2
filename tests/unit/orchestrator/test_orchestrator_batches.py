"""Batches: what is trained, what is rejected, and the metrics that say so."""

from __future__ import annotations

import numpy as np
import pytest

from rollstream.core.telemetry import names
from rollstream.core.wire import Rollout, encode
from rollstream.orchestrator.batch_builder import build_batch
from rollstream.orchestrator.credit import CreditAssignment, Grpo
from rollstream.orchestrator.groups import GroupInProgress, Received
from support.rollouts import make_branch, make_group, make_rollout


def group_of(rewards: list[float | None], index: int = 0, version: int = 0, **changes: object) -> GroupInProgress:
    """A finished group; None stands for a failed member."""
    group = make_group(index, size=len(rewards))
    entry = GroupInProgress(group)
    for member, reward in enumerate(rewards):
        error = "ProviderError" if reward is None else None
        rollout = make_rollout(group, member, reward, version=version, error=error, **changes)  # type: ignore[arg-type]
        entry.members[member] = received(rollout)
    return entry


def received(rollout: Rollout) -> Received:
    return Received(f"{rollout.group}.{rollout.member}", 1, f"digest-{rollout.member}", rollout)


def grpo(_: str) -> CreditAssignment:
    return Grpo()


def test_every_member_is_trained_or_rejected_and_none_is_both() -> None:
    groups = [group_of([1.0, 0.0, None, 1.0]), group_of([0.5, 0.5, 0.5, 0.5], index=1)]
    content = build_batch(3, groups, grpo)
    trained = {sample.subject for sample in content.samples}
    assert trained == {"t1-words-000000.0", "t1-words-000000.1", "t1-words-000000.3"}
    assert set(content.rejected) == {"t1-words-000000.2", *(f"t1-words-000001.{member}" for member in range(4))}
    everything = {member.subject for group in groups for member in group.members.values()}
    assert trained | set(content.rejected) == everything and not trained & set(content.rejected)


def test_advantages_sit_on_sampled_tokens_with_the_rollouts_digest() -> None:
    content = build_batch(1, [group_of([1.0, 0.0])], grpo)
    first, second = content.samples
    assert (first.subject, first.digest, first.branch) == ("t1-words-000000.0", "digest-0", 0)
    np.testing.assert_array_equal(first.advantages.numpy(), np.array([0, 0, 0, 0.5, 0.5, 0.5, 0.5], dtype="<f4"))
    np.testing.assert_array_equal(second.advantages.numpy(), -first.advantages.numpy())


def test_without_pruning_constant_groups_stay() -> None:
    content = build_batch(1, [group_of([1.0, 1.0])], grpo, prune_zero_advantage=False)
    assert len(content.samples) == 2 and content.rejected == ()
    assert all(not sample.advantages.numpy().any() for sample in content.samples)


def test_a_batch_that_would_train_nothing_keeps_its_samples() -> None:
    content = build_batch(1, [group_of([1.0, 1.0]), group_of([0.0, 0.0], index=1)], grpo)
    assert len(content.samples) == 4 and content.rejected == ()


def test_branches_that_do_not_train_are_left_out() -> None:
    branches = [make_branch(), make_branch(sampled=0), make_branch(trainable=False), make_branch(2, 2)]
    entry = group_of([1.0, 0.0], branches=branches)
    content = build_batch(1, [entry], grpo)
    trained = [(sample.subject[-1], sample.branch) for sample in content.samples]
    assert trained == [("0", 0), ("0", 3), ("1", 0), ("1", 3)]


def test_the_same_groups_make_the_same_batch() -> None:
    def build() -> list[bytes]:
        return [encode(sample) for sample in build_batch(2, [group_of([1.0, 0.0, 0.25])], grpo).samples]

    assert build() == build()


def test_metrics_tell_reward_errors_and_staleness() -> None:
    groups = [group_of([1.0, 0.0, None, 1.0], version=2), group_of([0.0, 0.0], index=1, version=4)]
    values = build_batch(6, groups, grpo).metrics
    assert values["train/agg/effective/agent/reward/mean"] == pytest.approx(0.4)
    assert values[names.reward_of_source("words")] == pytest.approx(0.4)
    assert values[names.BATCH_ERRORED] == pytest.approx(1 / 6)
    assert values[names.BATCH_ZERO_ADVANTAGE] == pytest.approx(0.4)
    assert values[names.OFF_POLICY_MAX] == 3.0 and values[names.OFF_POLICY_MEAN] == pytest.approx((3 * 3 + 2) / 5)
    assert values["train/agg/effective/agent/solve_none"] == 0.5
    assert values["train/agg/effective/agent/output_tokens/mean"] == 4.0
