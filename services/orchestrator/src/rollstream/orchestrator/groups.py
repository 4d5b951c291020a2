"""The groups that are dispatched and not yet decided: pure state, fed by the collector, read by everybody else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from rollstream.core.bus.subjects import token
from rollstream.core.wire import Group, OpenGroup, Rollout
from rollstream.orchestrator import pacing


@dataclass(frozen=True)
class Received:
    """A rollout as it stands on the bus. ``oldest`` is the oldest version that sampled one of its tokens, if any."""

    subject: str
    sequence: int
    digest: str
    rollout: Rollout

    @property
    def usable(self) -> bool:
        """Whether credit can be assigned: no error, a reward, a trainable branch with a sampled token."""
        rollout = self.rollout
        return rollout.error is None and rollout.reward is not None and any(
            branch.trainable and branch.spans for branch in rollout.branches
        )

    @property
    def oldest(self) -> int | None:
        versions = [span.version for branch in self.rollout.branches for span in branch.spans]
        return min(versions, default=None)

    @property
    def newest(self) -> int | None:
        versions = [span.version for branch in self.rollout.branches for span in branch.spans]
        return max(versions, default=None)


@dataclass
class GroupInProgress:
    """One group. Complete once every member has a rollout, errored ones included; each member counts once."""

    group: Group
    members: dict[int, Received] = field(default_factory=dict)
    started: int = -1
    """Newest version when it was dispatched; -1 when a predecessor dispatched it."""
    touched: float = field(default_factory=time.monotonic)
    """When it was opened, last received a rollout or was last looked into (monotonic seconds)."""

    def take(self, received: Received) -> None:
        """A member's rollout; raises ``ValueError`` for a member that the group does not have."""
        member = received.rollout.member
        if not 0 <= member < self.group.size:
            raise ValueError(f"{received.subject}: group {self.group.group} has {self.group.size} members")
        self.members.setdefault(member, received)
        self.touched = time.monotonic()

    @property
    def complete(self) -> bool:
        return len(self.members) == self.group.size

    @property
    def missing(self) -> list[int]:
        """Members without a rollout."""
        return [member for member in range(self.group.size) if member not in self.members]

    @property
    def usable(self) -> list[Received]:
        """Members that credit is assigned to, in member order."""
        return [received for _, received in sorted(self.members.items()) if received.usable]

    @property
    def oldest(self) -> int | None:
        """The oldest version that sampled a token of a usable member."""
        return min((value for member in self.usable if (value := member.oldest) is not None), default=None)

    @property
    def first_sequence(self) -> int | None:
        return min((member.sequence for member in self.members.values()), default=None)

    @property
    def last_error(self) -> str | None:
        """Kind and message of the error of the last failed member."""
        errors = [member.rollout.error for member in self.members.values() if member.rollout.error is not None]
        return f"{errors[-1].kind}: {errors[-1].message}" if errors else None


class GroupTable:
    """Undecided groups in the order in which they were dispatched.

    A group enters by :meth:`add`, gathers rollouts by :meth:`receive` and leaves by :meth:`remove` when it is decided:
    committed, dropped as stale, or failed. Rollouts of groups that are not here are decided already and ignored.
    """

    def __init__(self) -> None:
        # By the group's name as subjects write it, because that is what arriving rollouts are looked up by.
        self._groups: dict[str, GroupInProgress] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[GroupInProgress]:
        return iter(list(self._groups.values()))

    def get(self, group: str) -> GroupInProgress | None:
        """The group of that name, if it is undecided."""
        return self._groups.get(token(group))

    def at(self, subject_token: str) -> GroupInProgress | None:
        """The group whose name subjects write as ``subject_token``, if it is undecided."""
        return self._groups.get(subject_token)

    @property
    def episodes(self) -> int:
        """Episodes of undecided groups that have no rollout yet."""
        return sum(len(entry.missing) for entry in self._groups.values())

    def fresh(self, newest: int) -> int:
        """Groups that are complete or started under version ``newest``; the others straggle."""
        return sum(entry.started >= newest or entry.complete for entry in self._groups.values())

    def add(self, group: Group, started: int = -1) -> GroupInProgress:
        """Open ``group``; one that is open already stays, as the record that now speaks for it says."""
        entry = self._groups.setdefault(token(group.group), GroupInProgress(group, started=started))
        entry.group = group
        return entry

    def receive(self, received: Received) -> GroupInProgress | None:
        """Take a rollout; the group it belongs to, or None when that group is decided or unknown.

        Raises ``ValueError`` for a member that the group does not have.
        """
        entry = self.get(received.rollout.group)
        if entry is None:
            return None
        entry.take(received)
        return entry

    def remove(self, group: str) -> GroupInProgress:
        return self._groups.pop(token(group))

    def ready(self) -> list[GroupInProgress]:
        """Complete groups with something to assign credit to, oldest policy first, then in order of dispatch."""
        complete = [entry for entry in self._groups.values() if entry.complete and entry.usable]
        return sorted(complete, key=lambda entry: entry.oldest if entry.oldest is not None else 0)

    def failed(self) -> list[GroupInProgress]:
        """Complete groups in which no member can be used."""
        return [entry for entry in self._groups.values() if entry.complete and not entry.usable]

    def stale(self, step: int, max_off_policy_steps: int) -> list[GroupInProgress]:
        """Groups, complete or not, that are too old for batch ``step`` and thus for every later one."""
        floor = pacing.oldest_allowed(step, max_off_policy_steps)
        return [
            entry
            for entry in self._groups.values()
            if (oldest := entry.oldest) is not None and oldest < floor
        ]

    def open_groups(self) -> tuple[OpenGroup, ...]:
        """As the commit records them."""
        return tuple(
            OpenGroup(group=entry.group.group, source=entry.group.source, task=entry.group.task, size=entry.group.size)
            for entry in self._groups.values()
        )

    def low_water(self, position: int) -> int:
        """ROLLOUTS sequence below which every rollout that was read (up to ``position``, exclusive) is decided."""
        firsts = [first for entry in self._groups.values() if (first := entry.first_sequence) is not None]
        return min([position, *firsts])
