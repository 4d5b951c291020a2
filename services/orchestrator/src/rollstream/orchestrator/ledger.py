"""What the orchestrator knows: one object, rebuilt from the head commit and the bus, changed by the loop alone."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rollstream.core.bus.subjects import token
from rollstream.core.wire import Group, OrchestratorState
from rollstream.orchestrator.evals import EvalRun
from rollstream.orchestrator.groups import GroupInProgress, GroupTable, Received
from rollstream.orchestrator.pacing import Limit, Load


@dataclass
class Ledger:
    """The state of a run between two looks at the bus.

    ``committed`` is the step of the head batch, ``newest`` the newest announced version (-1 before v0). ``cursors``
    counts the training groups created per source, ``evals`` holds the last version evaluated per source. ``position``
    is the next ROLLOUTS sequence to read; every rollout below it is in ``table``, in ``evaluating`` or decided.
    ``rejected`` gathers what was decided without a batch since the head.
    """

    timeline: int
    committed: int = 0
    newest: int = -1
    cursors: dict[str, int] = field(default_factory=dict)
    evals: dict[str, int] = field(default_factory=dict)
    task_counts: dict[str, int] = field(default_factory=dict)
    position: int = 1
    table: GroupTable = field(default_factory=GroupTable)
    evaluating: dict[str, EvalRun] = field(default_factory=dict)
    rejected: list[str] = field(default_factory=list)
    dropped_stale: int = 0
    dropped_failed: int = 0
    failed_in_a_row: int = 0
    binding: Limit | None = None

    @classmethod
    def restored(cls, timeline: int, step: int, state: OrchestratorState) -> Ledger:
        """As of the head commit; open groups and rollouts are added by the recovery."""
        return cls(
            timeline=timeline,
            committed=step,
            cursors=dict(state.cursors),
            evals=dict(state.evals),
            task_counts=dict(state.task_counts),
            position=max(1, state.low_water),
        )

    @property
    def load(self) -> Load:
        return Load(
            committed=self.committed,
            newest=self.newest,
            groups=len(self.table),
            episodes=self.table.episodes,
            fresh=self.table.fresh(self.newest),
        )

    def group_at(self, subject_token: str) -> Group | None:
        """The open group (training or eval) whose name is written as ``subject_token`` in subjects."""
        entry = self.table.at(subject_token)
        if entry is None:
            entries = (run.groups.get(subject_token) for run in self.evaluating.values())
            entry = next((found for found in entries if found is not None), None)
        return None if entry is None else entry.group

    def receive(self, received: Received) -> bool:
        """Take a rollout as it was read; False when its group is decided already. Raises ``ValueError`` for a member
        that its group does not have."""
        self.position = max(self.position, received.sequence + 1)
        if received.rollout.kind == "train":
            return self.table.receive(received) is not None
        for run in self.evaluating.values():
            group = run.groups.get(token(received.rollout.group))
            if group is not None:
                group.take(received)
                return True
        return False

    def untouched(self, seconds: float) -> list[GroupInProgress]:
        """Incomplete groups, training and eval, to which nothing has happened for ``seconds``."""
        since = time.monotonic() - seconds
        evals = (group for run in self.evaluating.values() for group in run.groups.values())
        return [entry for entry in (*self.table, *evals) if entry.missing and entry.touched < since]

    def drop(self, entry: GroupInProgress, *, stale: bool) -> None:
        """Decide a group without a batch: too old, or nothing of it can be used."""
        self.table.remove(entry.group.group)
        self.rejected += [member.subject for _, member in sorted(entry.members.items())] or [entry.group.group]
        if stale:
            self.dropped_stale += 1
        else:
            self.dropped_failed += 1
            self.failed_in_a_row += 1

    def low_water(self) -> int:
        """ROLLOUTS sequence below which every rollout is decided. Rollouts of an open evaluation are not, though no
        commit will reference them: a purge must not take them before they are scored."""
        evals = [
            first
            for run in self.evaluating.values()
            for group in run.groups.values()
            if (first := group.first_sequence) is not None
        ]
        return min([self.table.low_water(self.position), *evals])

    def state(self) -> OrchestratorState:
        """For the commit that is about to be appended."""
        return OrchestratorState(
            cursors=dict(self.cursors),
            open_groups=self.table.open_groups(),
            low_water=self.low_water(),
            evals=dict(self.evals),
            task_counts=dict(self.task_counts),
        )
