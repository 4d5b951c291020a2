"""The env worker as a service: its parts, the tasks it owns, its start and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from contextlib import AsyncExitStack

import aiohttp
import structlog
from redis.exceptions import RedisError

from rollstream.core.bus import Bus
from rollstream.core.config import EnvWorkerConfig, SourceConfig
from rollstream.core.errors import UsageError
from rollstream.core.store import Lease, Role, State, Store
from rollstream.core.tasks import TaskOwner
from rollstream.core.telemetry import PrometheusServer
from rollstream.orchestrator.exposition import gauges
from rollstream.orchestrator.worker.environments import load_environment
from rollstream.orchestrator.worker.episodes import EpisodePlayer
from rollstream.orchestrator.worker.policy_client import PolicyClient
from rollstream.orchestrator.worker.pool import EpisodePool
from rollstream.orchestrator.worker.rendering import Rendering
from rollstream.orchestrator.worker.routers import Routers

COMPONENT: Role = "env-worker"
HEARTBEAT_SECONDS = 1.0
LEASE_SECONDS = 10.0

_log = structlog.get_logger(__name__)


class EnvWorkerService:
    """One env worker process.

    Lifecycle: :meth:`serve` loads every source (a broken one ends it with ``UsageError`` before it leases anything),
    then plays episodes until ``stop`` is set or the run is over. What is being played then is handed back.
    """

    def __init__(self, config: EnvWorkerConfig, bus: Bus, store: Store) -> None:
        self.config = config
        self.id = config.worker_id or f"{socket.gethostname()}-{os.getpid()}"
        self._metrics_address = ""
        self._bus = bus
        self._store = store
        self._routers = Routers([config.router_url] if config.router_url else [])
        self._state: State = "starting"

    async def serve(self, stop: asyncio.Event) -> None:
        """Play episodes until ``stop`` is set or the run's phase is final."""
        sources: list[tuple[str, SourceConfig]] = [("train", source) for source in self.config.train]
        sources += [("eval", source) for source in self.config.eval]
        if not sources:
            raise UsageError("an env worker needs sources", hint="give [[train]] in its configuration")
        async with AsyncExitStack() as stack:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            timeout = aiohttp.ClientTimeout(total=None, connect=10)
            http = await stack.enter_async_context(
                aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
            )
            rendering = Rendering.load(self.config.model.name)
            policy = PolicyClient(
                http, self._routers, rendering, model=self.config.model.name, seq_len=self.config.seq_len
            )
            players = {
                (kind, source.label): await self._player(stack, source, policy) for kind, source in sources
            }
            # What is loaded by now lives as long as the process; the collector need not walk it again.
            gc.collect()
            gc.freeze()
            await self._play(players, stop)

    async def _player(self, stack: AsyncExitStack, source: SourceConfig, policy: PolicyClient) -> EpisodePlayer:
        environment = load_environment(source, policy)
        await stack.enter_async_context(environment.serving())
        return EpisodePlayer(
            self._bus,
            environment,
            policy,
            model=self.config.model.name,
            worker=self.id,
            max_deliveries=self.config.workers.max_deliveries,
            timeout=self.config.workers.episode_timeout,
        )

    async def _play(self, players: dict[tuple[str, str], EpisodePlayer], stop: asyncio.Event) -> None:
        settings = self.config.workers
        labels = sorted({label for _, label in players})
        queues = {label: self._bus.episodes(label, lease_seconds=settings.lease_seconds) for label in labels}
        pool = EpisodePool(queues, players, settings.concurrency)
        self._state = "ready"
        registry = gauges(lambda: _pool_gauges(pool))
        async with PrometheusServer(self.config.metrics_server, registry) as metrics, TaskOwner() as owner:
            self._metrics_address = metrics.address
            owner.start(self._heartbeat(pool), "heartbeat")
            if not self.config.router_url:
                owner.start(self._find_routers(), "find routers")
            owner.start(pool.run(), "episodes")
            ended = owner.start(self._run_is_over(), "follow phase")
            stopping = owner.start(stop.wait(), "stop")
            await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
            owner.cancel()
        for queue in queues.values():
            await queue.close()
        try:
            await self._store.registry.drop(COMPONENT, self.id)
        except (RedisError, OSError) as error:
            _log.warning("lease left to expire; the store is away", error=str(error))

    # --- owned tasks -----------------------------------------------------------------------------------------------

    async def _find_routers(self) -> None:
        while True:
            try:
                leases = await self._store.registry.list("router")
                self._routers.replace([lease.address for lease in leases if lease.state == "ready" and lease.address])
            except (RedisError, OSError) as error:
                # The routers that were known are as good as any until Redis is back.
                _log.warning("the store is away; known routers are kept", error=str(error))
            await asyncio.sleep(0.5 if self._routers.empty else 2.0)

    async def _run_is_over(self) -> None:
        while True:
            if (await self._bus.intent.get()).phase.final:
                return
            await asyncio.sleep(1.0)

    async def _heartbeat(self, pool: EpisodePool) -> None:
        """Lease and progress. A store that is away costs the display, never an episode."""
        while True:
            lease = Lease(
                id=self.id, role=COMPONENT, state=self._state, capacity=self.config.workers.concurrency,
                inflight=len(pool.running), pid=os.getpid(), host=socket.gethostname(), metrics=self._metrics_address,
                detail=f"{pool.finished} episodes, {pool.failed} failed",
            )
            try:
                await self._store.registry.put(lease, LEASE_SECONDS)
                if away := self._bus.waits_for:
                    await self._store.progress.waiting(COMPONENT, self.id, away, None, "to write a rollout")
                elif self._routers.empty:
                    await self._store.progress.waiting(COMPONENT, self.id, "router", None, "no router in the registry")
                elif not pool.running:
                    await self._store.progress.waiting(COMPONENT, self.id, "episodes", None, "no episode to lease")
                else:
                    await self._store.progress.working(COMPONENT, self.id, f"{len(pool.running)} episodes")
            except (RedisError, OSError) as error:
                _log.warning("the store is away", error=str(error))
            await asyncio.sleep(HEARTBEAT_SECONDS)


def _pool_gauges(pool: EpisodePool) -> dict[str, tuple[str, float]]:
    return {
        "running_episodes": ("Episodes that this worker plays now.", float(len(pool.running))),
        "finished_episodes": ("Episodes that this worker has finished.", float(pool.finished)),
        "failed_episodes": ("Finished episodes that ended in an error.", float(pool.failed)),
    }
