"""Credit assignment: the reference values of oracles.md §1 for grpo, and the control experiment."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.orchestrator.credit import Grpo, ShuffledRewards
from rollstream.orchestrator.credit.base import spread_scalar, spread_values
from rollstream.orchestrator.credit.grpo import group_advantages
from rollstream.orchestrator.credit.shuffle import shuffled_rewards
from support.rollouts import make_branch, make_group, make_rollout


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0.5, 0.8], [0.2333333333, -0.2666666667, 0.0333333333]),
        ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ([0.7], [0.0]),
    ],
)
def test_grpo_reference_values(rewards: list[float], expected: list[float]) -> None:
    np.testing.assert_allclose(group_advantages(np.array(rewards, dtype=np.float64)), expected, atol=1e-9)


@given(st.floats(-1e6, 1e6), st.integers(1, 64), st.sampled_from(["none", "std"]))
def test_a_constant_group_gives_exactly_zero(value: float, size: int, normalize: str) -> None:
    assert not group_advantages(np.full(size, value), normalize).any()  # type: ignore[arg-type]


def test_std_normalisation_divides_by_the_population_std() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(group_advantages(rewards, "std"), (rewards - 0.25) / (np.sqrt(3) / 4 + 1e-6))
    assert np.abs(group_advantages(np.array([0.5, 0.5 + 1e-13]), "std")).max() < 1e-6


def test_scalar_lands_on_sampled_tokens_only() -> None:
    np.testing.assert_allclose(spread_scalar(0.7, np.array([False, True, False])), [0, 0.7, 0])
    np.testing.assert_allclose(spread_scalar(0.7, np.array([False, True, True])), [0, 0.7, 0.7])


def test_values_land_on_their_own_tokens() -> None:
    mask = np.array([False, False, True, True, False, True])
    np.testing.assert_allclose(spread_values([0.5, -0.5, 1], mask), [0, 0, 0.5, -0.5, 0, 1])
    with pytest.raises(ValueError, match="2 token advantages for 3 sampled tokens"):
        spread_values([0.5, 1], mask)


def test_every_branch_of_a_member_gets_its_advantage_unless_it_is_not_trained() -> None:
    group = make_group(size=2)
    members = [
        make_rollout(group, 0, 1.0, branches=[make_branch(), make_branch(2, 2), make_branch(1, 1, trainable=False)]),
        make_rollout(group, 1, 0.0),
    ]
    first, second = Grpo().assign(members)
    assert [branch.advantages.tolist() for branch in first] == [[0, 0, 0, 0.5, 0.5, 0.5, 0.5], [0, 0, 0.5, 0.5], [0, 0]]
    assert [branch.trains for branch in first] == [True, True, False]
    assert second[0].advantages.tolist() == [0, 0, 0, -0.5, -0.5, -0.5, -0.5]


def test_a_reward_that_is_no_number_is_refused() -> None:
    group = make_group(size=2)
    with pytest.raises(ValueError, match="no finite reward"):
        Grpo().assign([make_rollout(group, 0, float("nan")), make_rollout(group, 1, 0.0)])


def test_shuffled_rewards_are_a_permutation_that_only_seed_and_group_decide() -> None:
    members = [make_rollout(make_group(3, size=8), member, float(member)) for member in range(8)]
    shuffled = [rollout.reward for rollout in shuffled_rewards(members, seed=1)]
    assert sorted(shuffled, key=float) == list(range(8)) and shuffled != list(range(8))  # type: ignore[arg-type]
    assert shuffled == [rollout.reward for rollout in shuffled_rewards(members, seed=1)]
    assert shuffled != [rollout.reward for rollout in shuffled_rewards(members, seed=2)]
    elsewhere = [make_rollout(make_group(4, size=8), member, float(member)) for member in range(8)]
    assert shuffled != [rollout.reward for rollout in shuffled_rewards(elsewhere, seed=1)]


def test_the_control_breaks_the_link_between_reward_and_advantage() -> None:
    correlations = []
    for index in range(200):
        group = make_group(index, size=8)
        members = [make_rollout(group, member, float(member % 2)) for member in range(8)]
        credits = ShuffledRewards(Grpo(), seed=0).assign(members)
        products = [c[0].advantages[-1] * (m.reward or 0) for c, m in zip(credits, members, strict=True)]
        correlations.append(np.mean(products))
    assert abs(np.mean(correlations)) < 0.02  # the unshuffled figure is 0.25
