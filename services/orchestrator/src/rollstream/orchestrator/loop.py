"""The orchestrator's loop: looks at the ledger, does what can be done, waits for news."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable

import structlog

from rollstream.core.bus import Phase
from rollstream.core.config import OrchestratorConfig
from rollstream.core.errors import UsageError
from rollstream.core.telemetry import names
from rollstream.orchestrator.batch_builder import BatchContent
from rollstream.orchestrator.committer import Committer
from rollstream.orchestrator.dispatcher import Dispatcher
from rollstream.orchestrator.eval_runner import EvalRunner
from rollstream.orchestrator.groups import GroupInProgress
from rollstream.orchestrator.ledger import Ledger
from rollstream.orchestrator.pacing import may_commit
from rollstream.orchestrator.phases import PhaseWriter, phase_of

LOOK_SECONDS = 1.0
"""Without news the loop looks again after this long (a pause ends, a limit's time is counted)."""

FAILED_GROUPS_IN_A_ROW = 4
"""Batches' worth of groups that may fail one after the other before the run is given up."""

_log = structlog.get_logger(__name__)

OnCommit = Callable[[BatchContent, list[GroupInProgress]], None]


class EveryEpisodeFails(UsageError):
    """Nothing but failed episodes for so long that going on is pointless: a restart would not help either."""


class Loop:
    """Drops, commits, dispatches and evaluates until the run is done.

    The ledger is changed here and by the collector only, both on the event loop's thread and never across an await in
    between reading and deciding. ``paused`` stops dispatching; what is dispatched is finished and trained.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        ledger: Ledger,
        changed: asyncio.Event,
        *,
        dispatcher: Dispatcher,
        committer: Committer,
        evals: EvalRunner,
        phases: PhaseWriter,
        on_commit: OnCommit,
    ) -> None:
        self._config = config
        self._ledger = ledger
        self._changed = changed
        self._dispatcher = dispatcher
        self._committer = committer
        self._evals = evals
        self._phases = phases
        self._on_commit = on_commit
        self._limit_seconds: dict[str, float] = defaultdict(float)
        self._last_commit = time.monotonic()
        self.paused = False

    async def run(self) -> None:
        """Until every batch is committed and trained and the last version is evaluated."""
        looked = time.monotonic()
        while True:
            self._changed.clear()
            await self.look()
            phase = self.phase
            await self._phases.advance(phase)
            if phase is Phase.DONE:
                return
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                pass
            now = time.monotonic()
            if self._ledger.binding is not None:
                self._limit_seconds[self._ledger.binding] += now - looked
            looked = now

    @property
    def phase(self) -> Phase:
        ledger = self._ledger
        return phase_of(ledger.committed, ledger.newest, self._config.max_steps, evaluated=self._evals.idle)

    async def look(self) -> None:
        """One pass over everything that can be done now."""
        self._evals.close_complete()
        for run in self._evals.open_due():
            await self._evals.offer(run)
        while await self._commit_next():
            pass
        if self._ledger.newest >= 0 and not self.paused:
            while await self._dispatcher.admit():
                pass

    async def _commit_next(self) -> bool:
        """Commit the next batch if its groups and the trainer are there; whether one was committed."""
        ledger, config = self._ledger, self._config
        if ledger.committed >= config.max_steps:
            return False
        await self._drop()
        ready = ledger.table.ready()[: config.groups_per_batch]
        if len(ready) < config.groups_per_batch or self._evals.holds_first_batch:
            return False
        if ledger.newest < 0 or not may_commit(ledger.committed + 1, ledger.newest, config.max_lead):
            return False
        content = await self._committer.commit(ready, self._take_metrics())
        _log.info(
            "committed", step=content.step, samples=len(content.samples),
            reward=round(content.metrics.get(names.REWARD_MEAN, 0.0), 4), newest=ledger.newest,
            open_groups=len(ledger.table),
        )
        self._on_commit(content, ready)
        return True

    async def _drop(self) -> None:
        ledger = self._ledger
        for entry in ledger.table.stale(ledger.committed + 1, self._config.max_off_policy_steps):
            _log.info("group is too old and is dropped", group=entry.group.group, oldest=entry.oldest)
            ledger.drop(entry, stale=True)
            await self._dispatcher.cancel(entry)
        for entry in ledger.table.failed():
            _log.warning("every episode of a group failed", group=entry.group.group, error=entry.last_error)
            ledger.drop(entry, stale=False)
            if ledger.failed_in_a_row >= FAILED_GROUPS_IN_A_ROW * self._config.groups_per_batch:
                raise EveryEpisodeFails(
                    f"every episode of the last {ledger.failed_in_a_row} groups failed; the last one with "
                    f"{entry.last_error or 'no token that could be trained'}",
                    hint="see the env workers' logs; the taskset, the router or the engine is broken",
                )

    def _take_metrics(self) -> dict[str, float]:
        """Metrics of the time since the last commit, which end with it."""
        now = time.monotonic()
        values = {names.limit_seconds(limit): seconds for limit, seconds in self._limit_seconds.items()}
        values[names.DROPPED_STALE] = float(self._ledger.dropped_stale)
        values[names.DROPPED_FAILED] = float(self._ledger.dropped_failed)
        values[names.COMMIT_SECONDS] = now - self._last_commit
        self._ledger.dropped_stale = self._ledger.dropped_failed = 0
        self._limit_seconds.clear()
        self._last_commit = now
        return values
