"""The orchestrator as a service: its parts, the tasks it owns, its start and its end."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence

import structlog
from redis.exceptions import RedisError

from rollstream.core.bus import Bus, CommitChain, Phase, StaleWriter
from rollstream.core.config import OrchestratorConfig, SourceConfig
from rollstream.core.errors import RollstreamError, UsageError, first_cause
from rollstream.core.run import RunDir
from rollstream.core.store import Lease, Role, Store
from rollstream.core.tasks import TaskOwner
from rollstream.core.telemetry import MonitorGroup, PrometheusServer
from rollstream.orchestrator.batch_builder import BatchContent
from rollstream.orchestrator.collector import Collector
from rollstream.orchestrator.committer import Committer
from rollstream.orchestrator.credit import credit_assignment
from rollstream.orchestrator.dispatcher import Dispatcher
from rollstream.orchestrator.eval_runner import EvalRunner
from rollstream.orchestrator.evals import EvalRun
from rollstream.orchestrator.exposition import gauges
from rollstream.orchestrator.groups import GroupInProgress
from rollstream.orchestrator.ledger import Ledger
from rollstream.orchestrator.loop import Loop
from rollstream.orchestrator.pacing import Pacing
from rollstream.orchestrator.phases import PhaseWriter
from rollstream.orchestrator.recovery import resume
from rollstream.orchestrator.task_counts import ENDLESS, fingerprint, task_counts
from rollstream.orchestrator.traces import TraceWriter, advantages_by_subject
from rollstream.orchestrator.waiting import what_it_waits_for

COMPONENT: Role = "orchestrator"
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class OrchestratorService:
    """One orchestrator process.

    Lifecycle: :meth:`serve` takes the commit chain (every earlier orchestrator is refused from then on), restores the
    state of the head commit, and runs until the run is done, ``stop`` is set, or the chain is taken over
    (``StaleWriter``). Stopping changes nothing on the bus: the next orchestrator goes on from the head.
    """

    def __init__(
        self,
        config: OrchestratorConfig,
        run: RunDir,
        bus: Bus,
        store: Store,
        monitors: MonitorGroup,
    ) -> None:
        self.config = config
        self.id = f"{socket.gethostname()}-{os.getpid()}"
        self._bus = bus
        self._store = store
        self._monitors = monitors
        self._changed = asyncio.Event()
        self._metrics_address = ""
        self._traces = TraceWriter(run.rollouts) if config.write_rollouts else None

    async def serve(self, stop: asyncio.Event) -> bool:
        """Run to the end of the run (True) or until ``stop`` is set (False).

        Raises ``StaleWriter`` when another orchestrator took over, and whatever makes the run impossible.
        """
        if not self.config.train:
            raise UsageError("the orchestrator needs a training source", hint="give [[train]] with the id of a taskset")
        await self._bus.create_streams()
        chain = await self._bus.chain()
        counts = await task_counts([*self.config.train, *self.config.eval], chain.head.state.task_counts)
        await chain.take(self.id)
        phases = PhaseWriter(self._bus, chain.head.epoch)
        try:
            await self._run(chain, phases, counts, stop)
            return phases.current is Phase.DONE
        except Exception as error:
            cause = first_cause(error)
            if isinstance(cause, RollstreamError) and not isinstance(cause, StaleWriter):
                await phases.fail(str(cause))
            raise

    async def _run(
        self, chain: CommitChain, phases: PhaseWriter, counts: dict[str, int], stop: asyncio.Event
    ) -> None:
        config = self.config
        ledger = Ledger.restored(chain.head.timeline, chain.head.step, chain.head.state)
        ledger.task_counts = counts
        newest = await self._bus.weights.newest(ledger.timeline)
        ledger.newest = newest.version if newest is not None else -1
        collector = Collector(self._bus, ledger, self._changed)
        dispatcher = Dispatcher(self._bus, config, ledger, _pacing(config), _sizes(config.train, counts))
        evals = EvalRunner(self._bus, config, ledger, dispatcher, _sizes(config.eval, counts), self._evaluated)
        credit = credit_assignment(config)
        committer = Committer(chain, ledger, lambda _: credit, prune_zero_advantage=config.prune_zero_advantage)
        loop = Loop(
            config, ledger, self._changed, dispatcher=dispatcher, committer=committer, evals=evals, phases=phases,
            on_commit=self._committed,
        )
        await phases.advance(Phase.STARTING)
        registry = gauges(lambda: _ledger_gauges(ledger))
        async with PrometheusServer(config.metrics_server, registry) as metrics, TaskOwner() as owner:
            self._metrics_address = metrics.address
            owner.start(self._heartbeat(ledger, loop, evals), "heartbeat")
            await resume(self._bus, chain, ledger, dispatcher, collector, evals)
            owner.start(collector.follow(), "read rollouts")
            owner.start(self._follow_weights(ledger), "follow weights")
            owner.start(self._follow_intent(loop), "follow intent")
            owner.start(self._look_after(ledger, collector, dispatcher), "look after open groups")
            traces = owner.start(self._traces.run(), "write traces") if self._traces is not None else None
            running = owner.start(loop.run(), "loop")
            stopping = owner.start(stop.wait(), "stop")
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if self._traces is not None and traces is not None:
                await self._traces.close()
                await asyncio.wait({traces}, timeout=10)
            owner.cancel()
        await collector.close()
        try:
            await self._store.registry.drop(COMPONENT, self.id)
        except (RedisError, OSError) as error:
            _log.warning("lease left to expire; the store is away", error=str(error))

    # --- what the loop reports -------------------------------------------------------------------------------------

    def _committed(self, content: BatchContent, groups: list[GroupInProgress]) -> None:
        # The metrics ride in the batch record: the trainer logs them with its own, one line a step.
        if self._traces is not None:
            members = [member for group in groups for _, member in sorted(group.members.items())]
            self._traces.write(content.step, "train", members, advantages_by_subject(content.samples))

    def _evaluated(self, version: int, metrics: dict[str, float], run: EvalRun) -> None:
        self._monitors.log(version, metrics)
        if self._traces is not None:
            members = [member for group in run.groups.values() for _, member in sorted(group.members.items())]
            self._traces.write(version, "eval", members, {})

    # --- owned tasks -----------------------------------------------------------------------------------------------

    async def _follow_weights(self, ledger: Ledger) -> None:
        async with self._bus.weights.follow(ledger.timeline) as reader:
            while True:
                for stored in await reader.batch(64, timeout=2.0):
                    version = int(stored.subject.rpartition(".")[2])
                    if version > ledger.newest:
                        ledger.newest = version
                        self._changed.set()

    async def _look_after(self, ledger: Ledger, collector: Collector, dispatcher: Dispatcher) -> None:
        """Nothing may stay open because of a message that never comes: look at the bus itself, and offer again.

        Offering is harmless where an episode waits or runs: its subject is taken then.
        """
        seconds = max(10.0, 2 * self.config.workers.lease_seconds)
        while True:
            await asyncio.sleep(seconds / 2)
            for entry in ledger.untouched(seconds):
                entry.touched = time.monotonic()
                await collector.look_for(entry)
                await dispatcher.republish([entry])

    async def _follow_intent(self, loop: Loop) -> None:
        while True:
            loop.paused = (await self._bus.intent.get()).paused
            await asyncio.sleep(1.0)

    async def _heartbeat(self, ledger: Ledger, loop: Loop, evals: EvalRunner) -> None:
        """Lease and progress. A store that is away costs the display, never the run."""
        told = -1
        while True:
            lease = Lease(
                id=self.id, role=COMPONENT, state="ready", timeline=ledger.timeline, version=ledger.newest,
                inflight=ledger.table.episodes, pid=os.getpid(), host=socket.gethostname(),
                metrics=self._metrics_address,
            )
            waits = what_it_waits_for(self.config, ledger, paused=loop.paused, holds=evals.holds_first_batch)
            try:
                await self._store.registry.put(lease, LEASE_SECONDS)
                if ledger.committed != told:  # the wait for the next batch is a new one, for the same reason
                    await self._store.progress.working(COMPONENT, self.id, f"committed batch {ledger.committed}")
                    told = ledger.committed
                reason = self._bus.waits_for or waits.reason
                await self._store.progress.waiting(COMPONENT, self.id, reason, None, waits.detail)
            except (RedisError, OSError) as error:
                _log.warning("the store is away", error=str(error))
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _sizes(sources: Sequence[SourceConfig], counts: dict[str, int]) -> dict[str, int | None]:
    """Label → number of tasks, None for an endless taskset."""
    found = {source.label: counts[fingerprint(source)] for source in sources}
    return {label: None if count == ENDLESS else count for label, count in found.items()}


def _ledger_gauges(ledger: Ledger) -> dict[str, tuple[str, float]]:
    return {
        "committed_step": ("Step of the last committed batch.", float(ledger.committed)),
        "newest_version": ("Newest announced policy version, -1 before the first.", float(ledger.newest)),
        "open_groups": ("Groups that are dispatched and not decided.", float(len(ledger.table))),
        "open_episodes": ("Episodes of those groups without a rollout.", float(ledger.table.episodes)),
        "open_evaluations": ("Evaluations under way.", float(len(ledger.evaluating))),
    }


def _pacing(config: OrchestratorConfig) -> Pacing:
    return Pacing(
        groups_per_batch=config.groups_per_batch,
        max_steps=config.max_steps,
        max_lead=config.max_lead,
        max_off_policy_steps=config.max_off_policy_steps,
        max_inflight_episodes=config.max_inflight_episodes,
    )
