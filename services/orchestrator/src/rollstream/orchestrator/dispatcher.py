"""Opens groups: the record on GROUPS first, then one episode a member."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable

import structlog

from rollstream.core import failpoints
from rollstream.core.bus import Bus, group_id
from rollstream.core.config import OrchestratorConfig, SourceConfig, TrainSourceConfig
from rollstream.core.errors import RollstreamError
from rollstream.core.wire import Episode, Group, Sampling
from rollstream.orchestrator.groups import GroupInProgress
from rollstream.orchestrator.ledger import Ledger
from rollstream.orchestrator.pacing import Pacing, binding_limit, min_version, oldest_allowed
from rollstream.orchestrator.sources import TaskOrder, next_source

AT_ONCE = 16
"""Groups that are created concurrently. After a crash the ones that exist may have gaps of at most this many."""

_log = structlog.get_logger(__name__)


def sampling_of(source: SourceConfig, config: OrchestratorConfig) -> Sampling:
    """How episodes of ``source`` sample."""
    chosen = source.sampling or config.sampling
    return Sampling(temperature=chosen.temperature, max_tokens=chosen.max_tokens, seed=chosen.seed)


class Dispatcher:
    """Draws tasks and opens their groups as far as the pacing limits admit.

    A group's name is a function of its source and position, so a dispatcher that crashed half way meets its own
    records again instead of making a second group.
    """

    def __init__(
        self, bus: Bus, config: OrchestratorConfig, ledger: Ledger, pacing: Pacing, sizes: dict[str, int | None]
    ) -> None:
        self._bus = bus
        self._config = config
        self._ledger = ledger
        self._pacing = pacing
        self._sources: dict[str, TrainSourceConfig] = {source.label: source for source in config.train}
        self._ratios = [(source.label, source.ratio) for source in config.train]
        self._orders = {label: TaskOrder(label, sizes[label], config.seed) for label in self._sources}

    async def admit(self) -> int:
        """Open the groups that the limits admit now (a bounded number); how many. Notes which limit binds then."""
        ledger = self._ledger
        planned: list[tuple[Group, int]] = []
        while len(planned) < AT_ONCE:
            label = next_source(ledger.cursors, self._ratios)
            ledger.binding = binding_limit(self._pacing, ledger.load, self._group_size(label))
            if ledger.binding is not None:
                break
            floor = min_version(self._pacing, ledger.load)
            position = ledger.cursors.get(label, 0)
            group = self._draw(label, position)
            ledger.cursors[label] = position + 1
            ledger.table.add(group, started=ledger.newest)
            planned.append((group, floor))
        await asyncio.gather(*(self.create(group, floor) for group, floor in planned))
        return len(planned)

    async def create(self, group: Group, floor: int) -> None:
        """Write ``group`` and offer its episodes, to be sampled by version ``floor`` or newer."""
        standing = (await self._bus.put_once(self._bus.subjects.group(group.group), group)).stored.record
        if not isinstance(standing, Group) or standing.group != group.group:
            raise RollstreamError(
                f"{self._bus.subjects.group(group.group)} holds something else than group {group.group}",
                hint="another program wrote to this run's bus; start a new run",
            )
        entry = self._ledger.table.get(group.group)
        if entry is not None:
            entry.group = standing
        failpoints.hit("after_group_before_episodes")
        await self.offer(standing, range(standing.size), floor)

    async def offer(self, group: Group, members: Iterable[int], floor: int) -> None:
        """Put episodes of ``members`` on the work queue; those that wait or run there already stay as they are."""
        await asyncio.gather(
            *(
                self._bus.put_once(
                    self._bus.subjects.episode(group.source, group.group, member),
                    Episode(
                        group=group.group,
                        member=member,
                        kind=group.kind,
                        source=group.source,
                        task=group.task,
                        sampling=group.sampling,
                        timeline=group.timeline,
                        min_version=floor,
                    ),
                )
                for member in members
            )
        )

    async def republish(self, entries: Iterable[GroupInProgress]) -> int:
        """Offer every member without a rollout again (after a restart); how many."""
        floor = max(0, oldest_allowed(self._ledger.committed + 1, self._config.max_off_policy_steps))
        missing = [(entry.group, entry.missing) for entry in entries if entry.missing]
        for group, members in missing:
            await self.offer(group, members, group.eval_version if group.eval_version is not None else floor)
        return sum(len(members) for _, members in missing)

    async def cancel(self, entry: GroupInProgress) -> None:
        """Take the episodes of a dropped group that nobody has leased off the queue. What runs is let run."""
        if entry.missing:
            group = entry.group
            await self._bus.purge_subject("EPISODES", self._bus.subjects.episodes_of_group(group.source, group.group))

    async def adopt(self) -> list[Group]:
        """Groups that were created after the head commit, by a predecessor; cursors move behind them.

        A group whose predecessor in line is missing was created concurrently with it: the missing one is created now.
        """
        adopted = []
        for label in self._sources:
            position = self._ledger.cursors.get(label, 0)
            found: dict[int, Group] = {}
            probe = position
            while probe < max([position, *(index + 1 for index in found)]) + AT_ONCE:
                name = group_id("train", self._ledger.timeline, label, probe)
                stored = await self._bus.get(self._bus.subjects.group(name))
                if stored is not None and isinstance(group := stored.record, Group):
                    found[probe] = group
                probe += 1
            for index in range(position, max(found, default=position - 1) + 1):
                group = found.get(index) or self._draw(label, index)
                self._ledger.table.add(group)
                self._ledger.cursors[label] = index + 1
                adopted.append(group)
                if index not in found:
                    await self.create(group, 0)
        return adopted

    def _draw(self, label: str, position: int) -> Group:
        source = self._sources[label]
        return Group(
            group=group_id("train", self._ledger.timeline, label, position),
            kind="train",
            source=label,
            task=self._orders[label].task(position),
            size=self._group_size(label),
            sampling=sampling_of(source, self._config),
            timeline=self._ledger.timeline,
            created=time.time_ns(),
        )

    def _group_size(self, label: str) -> int:
        return self._sources[label].group_size or self._config.group_size
