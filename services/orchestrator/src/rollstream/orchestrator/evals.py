"""Held-out evaluation: which version is due, and the scores of one evaluation. Pure; the loop does the I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollstream.core.bus.subjects import group_id
from rollstream.core.config import EvalSourceConfig
from rollstream.core.wire import Group, Sampling
from rollstream.orchestrator.groups import GroupInProgress
from rollstream.orchestrator.scores import eval_scores


def due_version(interval: int, newest: int, done: int, max_steps: int) -> int | None:
    """The version to evaluate next: the newest multiple of ``interval`` (or the last version) above ``done``.

    Versions that were overtaken before their turn are skipped: nothing serves them any more. ``done`` is -1 before
    the first evaluation, so that v0, the base model, always comes first.
    """
    candidate = max_steps if newest >= max_steps else newest - newest % interval if newest >= 0 else -1
    return candidate if candidate > done else None


@dataclass
class EvalRun:
    """One evaluation of ``version`` on one source; complete when every group is. Its groups never turn stale.

    ``groups`` is keyed by the group's name as subjects write it.
    """

    source: str
    version: int
    groups: dict[str, GroupInProgress] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return bool(self.groups) and all(group.complete for group in self.groups.values())

    @property
    def missing(self) -> int:
        """Episodes without a rollout."""
        return sum(len(group.missing) for group in self.groups.values())

    def metrics(self) -> dict[str, float]:
        """Scores by name (``reward/mean``, ``avg@k``, …), and the share of episodes that failed."""
        rewards: Mapping[int, Sequence[float]] = {
            group.group.task: [
                float(member.rollout.reward)
                for member in group.members.values()
                if member.rollout.error is None and member.rollout.reward is not None
            ]
            for group in self.groups.values()
        }
        episodes = sum(group.group.size for group in self.groups.values())
        scored = sum(len(values) for values in rewards.values())
        return {**eval_scores(rewards), "errored": 1.0 - scored / episodes if episodes else 0.0}


def eval_groups(
    source: EvalSourceConfig, tasks: int | None, version: int, timeline: int, sampling: Sampling, created: int
) -> list[Group]:
    """The groups of one evaluation: the first tasks of the split, in order."""
    count = source.num_tasks if tasks is None else min(source.num_tasks, tasks)
    return [
        Group(
            group=group_id("eval", timeline, source.label, index, version),
            kind="eval",
            source=source.label,
            task=index,
            size=source.rollouts_per_task,
            sampling=sampling,
            timeline=timeline,
            created=created,
            eval_version=version,
        )
        for index in range(count)
    ]
