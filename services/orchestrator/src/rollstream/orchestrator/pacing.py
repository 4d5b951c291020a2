"""The two pacing limits, as pure functions.

Steps are 1-indexed, versions 0-indexed: batch n trains on v{n-1} and makes v{n}. A batch may be committed only when
the trainer is close enough (``max_lead``); a token may be trained only when the version that sampled it is close
enough to the one its batch trains on (``max_off_policy_steps``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Limit = Literal["max_lead", "max_off_policy_steps", "max_inflight_episodes", "max_steps"]
"""What keeps the next group from being dispatched. ``max_steps``: every remaining step has its groups."""


def may_commit(step: int, newest: int, max_lead: int) -> bool:
    """Whether batch ``step`` may be committed while ``newest`` is the newest announced version."""
    return newest >= step - 1 - max_lead


def staleness(step: int, oldest: int) -> int:
    """Versions between the one batch ``step`` trains on and ``oldest``, which sampled its oldest token."""
    return step - 1 - oldest


def oldest_allowed(step: int, max_off_policy_steps: int) -> int:
    """The oldest version that may have sampled a token of batch ``step`` (negative: any)."""
    return step - 1 - max_off_policy_steps


def landing_step(committed: int, active: int, groups_per_batch: int) -> int:
    """The batch in which the last of ``active`` undecided groups lands, if they land in order."""
    return committed + -(-active // groups_per_batch)


@dataclass(frozen=True)
class Pacing:
    """The limits of a run. Invariant: ``max_off_policy_steps`` ≥ ``max_lead`` (the configuration checks it)."""

    groups_per_batch: int
    max_steps: int
    max_lead: int
    max_off_policy_steps: int
    max_inflight_episodes: int | None = None


@dataclass(frozen=True)
class Load:
    """Where a run stands: last committed step, newest announced version, undecided groups and episodes.

    ``fresh`` counts the groups that the next batches can be made of: complete ones, and those that started under the
    newest version. The rest straggle, and nothing is made to wait for them.
    """

    committed: int
    newest: int
    groups: int
    episodes: int
    fresh: int


def binding_limit(pacing: Pacing, load: Load, group_size: int) -> Limit | None:
    """The limit that forbids one more group of ``group_size`` episodes now; None admits it.

    It is admitted iff a remaining step needs it, the batch in which it lands behind the fresh groups could be
    committed now (sampling further ahead would only let it age), it would not be too old even if it landed behind the
    stragglers too, and its episodes fit under the cap. A single group is never refused for its size alone, or the run
    would stand still.
    """
    if load.groups + 1 > (pacing.max_steps - load.committed) * pacing.groups_per_batch:
        return "max_steps"
    soonest = landing_step(load.committed, load.fresh + 1, pacing.groups_per_batch)
    if not may_commit(soonest, load.newest, pacing.max_lead):
        return "max_lead"
    latest = landing_step(load.committed, load.groups + 1, pacing.groups_per_batch)
    if staleness(latest, load.newest) > pacing.max_off_policy_steps:
        return "max_off_policy_steps"
    cap = pacing.max_inflight_episodes
    if cap is not None and load.episodes and load.episodes + group_size > cap:
        return "max_inflight_episodes"
    return None


def min_version(pacing: Pacing, load: Load) -> int:
    """The oldest version that may sample the group admitted under ``load``, should it land as late as it may."""
    landing = landing_step(load.committed, load.groups + 1, pacing.groups_per_batch)
    return max(0, min(load.newest, oldest_allowed(landing, pacing.max_off_policy_steps)))
