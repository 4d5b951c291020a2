"""Opens evaluations when a version is due, and closes them when their last rollout is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from rollstream.core.bus import Bus, token
from rollstream.core.config import EvalSourceConfig, OrchestratorConfig
from rollstream.core.telemetry import names
from rollstream.orchestrator.dispatcher import Dispatcher, sampling_of
from rollstream.orchestrator.evals import EvalRun, due_version, eval_groups
from rollstream.orchestrator.groups import GroupInProgress
from rollstream.orchestrator.ledger import Ledger

_log = structlog.get_logger(__name__)

Report = Callable[[int, dict[str, float], EvalRun], None]
"""Takes the version evaluated, the metrics by full name, and the run itself."""


class EvalRunner:
    """At most one evaluation a source at a time. Groups are named after version, source and task, so an evaluation
    that was under way at a crash is taken up where it stood, from the rollouts that exist."""

    def __init__(
        self,
        bus: Bus,
        config: OrchestratorConfig,
        ledger: Ledger,
        dispatcher: Dispatcher,
        sizes: dict[str, int | None],
        report: Report,
    ) -> None:
        self._bus = bus
        self._config = config
        self._ledger = ledger
        self._dispatcher = dispatcher
        self._sizes = sizes
        self._report = report

    @property
    def holds_first_batch(self) -> bool:
        """Whether batch 1 has to wait: the base model is to be evaluated before v1 replaces it."""
        return self._ledger.committed == 0 and any(
            self._ledger.evals.get(source.label, -1) < 0 for source in self._config.eval
        )

    @property
    def idle(self) -> bool:
        """Whether nothing is under way and nothing is due."""
        return not self._ledger.evaluating and not any(self._due(source) is not None for source in self._config.eval)

    def open_due(self) -> list[EvalRun]:
        """Enter due evaluations into the ledger, without I/O; :meth:`offer` brings them to the workers."""
        opened = []
        for source in self._config.eval:
            version = self._due(source)
            if source.label in self._ledger.evaluating or version is None:
                continue
            groups = eval_groups(
                source, self._sizes[source.label], version, self._ledger.timeline,
                sampling_of(source, self._config), time.time_ns(),
            )
            run = EvalRun(source.label, version, {token(group.group): GroupInProgress(group) for group in groups})
            self._ledger.evaluating[source.label] = run
            opened.append(run)
        return opened

    async def offer(self, run: EvalRun) -> None:
        """Write the groups of ``run`` and offer the members that have no rollout, to replicas with its version."""
        _log.info("evaluating", source=run.source, version=run.version, episodes=run.missing)

        async def create(entry: GroupInProgress) -> None:
            await self._bus.put_once(self._bus.subjects.group(entry.group.group), entry.group)
            await self._dispatcher.offer(entry.group, entry.missing, run.version)

        await asyncio.gather(*(create(entry) for entry in run.groups.values()))

    def close_complete(self) -> bool:
        """Report and forget evaluations whose every episode has a rollout; whether there was one."""
        complete = [run for run in self._ledger.evaluating.values() if run.complete]
        for run in complete:
            del self._ledger.evaluating[run.source]
            self._ledger.evals[run.source] = run.version
            values = {names.eval_metric(run.source, name): value for name, value in run.metrics().items()}
            _log.info("evaluated", source=run.source, version=run.version, **run.metrics())
            self._report(run.version, values, run)
        return bool(complete)

    def _due(self, source: EvalSourceConfig) -> int | None:
        done = self._ledger.evals.get(source.label, -1)
        return due_version(source.interval, self._ledger.newest, done, self._config.max_steps)
