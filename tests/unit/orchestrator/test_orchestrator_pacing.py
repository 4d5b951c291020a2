"""Pacing: the reference values of oracles.md §4, and that the gates can never stop a run for good."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.orchestrator.pacing import (
    Load,
    Pacing,
    binding_limit,
    landing_step,
    may_commit,
    min_version,
    oldest_allowed,
    staleness,
)


@pytest.mark.parametrize(("step", "needed"), [(1, -1), (2, 0), (3, 1), (10, 8)])
def test_version_needed_to_ship_a_batch(step: int, needed: int) -> None:
    assert may_commit(step, needed, 1)
    assert not may_commit(step, needed - 1, 1)


def load(committed: int, newest: int, groups: int = 0, episodes: int = 0, fresh: int | None = None) -> Load:
    return Load(committed, newest, groups, episodes, groups if fresh is None else fresh)


def test_dispatch_pauses_when_the_next_batch_could_not_be_committed() -> None:
    pacing = Pacing(groups_per_batch=2, max_steps=100, max_lead=1, max_off_policy_steps=8)
    assert binding_limit(pacing, load(2, 0), 4) == "max_lead"
    assert binding_limit(pacing, load(2, 1), 4) is None


def test_fresh_groups_are_not_piled_up_beyond_what_can_be_committed() -> None:
    pacing = Pacing(groups_per_batch=2, max_steps=100, max_lead=1, max_off_policy_steps=8)
    assert binding_limit(pacing, load(2, 2, groups=3), 4) is None  # batch 4 may follow v2
    assert binding_limit(pacing, load(2, 2, groups=4), 4) == "max_lead"  # batch 5 may not


def test_stragglers_are_replaced_up_to_the_staleness_bound() -> None:
    pacing = Pacing(groups_per_batch=2, max_steps=100, max_lead=1, max_off_policy_steps=3)
    assert binding_limit(pacing, load(2, 2, groups=7, fresh=3), 4) is None
    assert binding_limit(pacing, load(2, 2, groups=8, fresh=3), 4) == "max_off_policy_steps"


def test_oldest_version_of_a_batch() -> None:
    assert oldest_allowed(10, 8) == 1
    assert staleness(10, 1) == 8 and staleness(10, 0) == 9
    assert all(oldest_allowed(step, 8) <= 0 for step in range(1, 10))


def test_staleness_splits_into_flight_and_queue() -> None:
    assert staleness(10, 1) == 8
    assert 3 - 1 == 2 and staleness(10, 3) == 6
    assert staleness(3, 2) == 0


@pytest.mark.parametrize(("active", "landing"), [(1, 6), (4, 6), (5, 7), (8, 7), (9, 8)])
def test_landing_step_counts_whole_batches(active: int, landing: int) -> None:
    assert landing_step(5, active, 4) == landing


def test_an_episode_is_sampled_by_a_version_that_fits_the_batch_where_it_may_land() -> None:
    pacing = Pacing(groups_per_batch=4, max_steps=100, max_lead=1, max_off_policy_steps=2)
    assert min_version(pacing, load(5, 5, groups=11, fresh=3)) == 5  # batch 8 trains on v7
    assert min_version(pacing, load(5, 5, groups=3)) == 3
    assert min_version(pacing, load(0, 0)) == 0


def test_episode_cap_and_end_of_the_run_bind() -> None:
    pacing = Pacing(groups_per_batch=2, max_steps=6, max_lead=1, max_off_policy_steps=8, max_inflight_episodes=16)
    assert binding_limit(pacing, load(4, 4, 1, 9), 8) == "max_inflight_episodes"
    assert binding_limit(pacing, load(4, 4, 1, 8), 8) is None
    assert binding_limit(pacing, load(4, 4, 4, 0), 8) == "max_steps"
    assert binding_limit(pacing, load(6, 6), 8) == "max_steps"


def test_one_group_is_admitted_even_above_the_episode_cap() -> None:
    pacing = Pacing(groups_per_batch=2, max_steps=6, max_lead=1, max_off_policy_steps=8, max_inflight_episodes=4)
    assert binding_limit(pacing, load(0, 0), 8) is None


@st.composite
def situations(draw: st.DrawFn) -> tuple[Pacing, int, int, int]:
    lead = draw(st.integers(0, 3))
    pacing = Pacing(
        groups_per_batch=draw(st.integers(1, 4)),
        max_steps=draw(st.integers(1, 12)),
        max_lead=lead,
        max_off_policy_steps=draw(st.integers(lead, lead + 4)),
        max_inflight_episodes=draw(st.none() | st.integers(1, 12)),
    )
    committed = draw(st.integers(0, pacing.max_steps))
    newest = draw(st.integers(max(0, committed - 1 - lead), committed))
    return pacing, committed, newest, draw(st.integers(0, 2**31))


@settings(max_examples=300, deadline=None)
@given(situations())
def test_a_run_always_reaches_its_end(situation: tuple[Pacing, int, int, int]) -> None:
    """From a fresh start or any resumed state, whatever finishes in whatever order, every batch is committed in bounds.

    The simulated world may finish any open group (sampled by any version from the admitted minimum to the newest) or
    train any committed batch; a group can fail or be too old. It must never be out of moves before the end.
    """
    pacing, committed, newest, seed = situation
    world = random.Random(seed)
    size = 4
    running: dict[int, tuple[int, int]] = {}  # group → (oldest version that may sample it, version it started under)
    done: dict[int, int] = {}  # finished group → version that sampled it
    name = 0

    def stand() -> Load:
        fresh = len(done) + sum(started >= newest for _, started in running.values())
        return Load(committed, newest, len(running) + len(done), size * len(running), fresh)

    for _ in range(4000):
        for group in [g for g, v in done.items() if staleness(committed + 1, v) > pacing.max_off_policy_steps]:
            del done[group]
        ready = sorted(done, key=lambda g: (done[g], g))[: pacing.groups_per_batch]
        if (
            committed < pacing.max_steps
            and len(ready) == pacing.groups_per_batch
            and may_commit(committed + 1, newest, pacing.max_lead)
        ):
            committed += 1
            for group in ready:
                assert staleness(committed, done.pop(group)) <= pacing.max_off_policy_steps
            continue
        while binding_limit(pacing, stand(), size) is None:
            running[name] = (min_version(pacing, stand()), newest)
            name += 1
        moves = ["finish"] * bool(running) + ["train"] * (newest < committed)
        if not moves:
            break
        if world.choice(moves) == "train":
            newest += 1
        else:
            group = world.choice(list(running))
            floor, _ = running.pop(group)
            if world.random() > 0.1:  # else every member failed
                done[group] = world.randint(floor, newest)
    assert committed == pacing.max_steps and newest == pacing.max_steps
