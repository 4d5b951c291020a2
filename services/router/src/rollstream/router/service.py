"""The router as a service: its parts, the tasks it owns, its start and its end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

import structlog
from prometheus_client import CollectorRegistry

from rollstream.core.config.serving import RouterConfig
from rollstream.core.errors import UsageError
from rollstream.core.store import Lease, Store
from rollstream.core.tasks import TaskOwner
from rollstream.core.telemetry import names
from rollstream.router.affinity import Affinity, AffinityAway
from rollstream.router.app import App
from rollstream.router.balancer import Balancer
from rollstream.router.http_client import Pool
from rollstream.router.http_server import Server
from rollstream.router.limits import Limits
from rollstream.router.metrics import RouterCollector, Stats, exposition
from rollstream.router.proxy import Proxy
from rollstream.router.view import Fleet

log = structlog.get_logger(__name__)


class RouterService:
    """One router process.

    Lifecycle: ``serve`` binds, registers the lease, routes until ``stop`` is set, then drains, drops the lease and
    returns. The tasks it owns (look at the registry, report load, keep the lease, sweep deadlines) end with it; if one
    of them fails, ``serve`` fails.
    """

    def __init__(self, config: RouterConfig, store: Store) -> None:
        self.config = config
        self.id = config.router_id or f"{socket.gethostname()}-{os.getpid()}"
        self.address = ""
        limits = Limits.of(config)
        self.stats = Stats()
        self.fleet = Fleet()
        self._affinity = Affinity(store, self.id, config.session_ttl, config.lease_seconds)
        self.balancer = Balancer(self.fleet, self._affinity, config.no_replica_timeout)
        self._pool = Pool(limits)
        proxy = Proxy(
            self.fleet,
            self.balancer,
            self._pool,
            self.stats,
            retries=config.retries,
            no_replica_timeout=config.no_replica_timeout,
        )
        self.metrics = CollectorRegistry()
        self.metrics_address = ""
        self.metrics.register(RouterCollector(self.stats, self._gauges, lambda: self.balancer.open))
        app = App(
            self.fleet,
            self.balancer,
            proxy,
            draining=lambda: self._server.draining,
            exposition=lambda: exposition(self.metrics),
            debug=config.log.level == "debug",
        )
        self._server = Server(app, limits, self.stats.count_reply)

    async def serve(self, stop: asyncio.Event) -> None:
        """Routes until ``stop`` is set.

        Raises:
            UsageError: the configured address cannot be bound.
        """
        await self._bind()
        await self._look()
        async with TaskOwner() as owner:
            owner.start(self._look_forever(), "look at the registry")
            owner.start(self.balancer.report_forever(), "report load")
            owner.start(self._sweep_forever(), "sweep deadlines")
            keeper = owner.start(self._keep_lease(), "keep the lease")
            log.info("router ready", id=self.id, address=self.address)
            await stop.wait()
            await self._drain()
            keeper.cancel()
            await self._leave()
            owner.cancel()
        self._pool.close()

    async def _bind(self) -> None:
        host, port = self.config.host, self.config.port
        try:
            bound = await self._server.start(host, port)
        except OSError as error:
            raise UsageError(
                f"the router cannot listen on {host}:{port}: {error.strerror or error}",
                hint="choose another --port, 0 lets the OS choose; --host sets the address",
            ) from error
        # An address that means "every interface" is none that others could connect to.
        shown = socket.gethostname() if host in ("0.0.0.0", "::", "") else f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{bound}"

    async def _drain(self) -> None:
        log.info("router draining", open=sum(self.balancer.open.values()))
        self._server.draining = True
        await self._put_lease()  # others see "draining" and go elsewhere
        left = await self._server.drain(self.config.drain_timeout)
        if left:
            log.warning("requests broken off at the drain deadline", connections=left)
        await self._server.close()

    async def _leave(self) -> None:
        try:
            await self._affinity.report({})
            await self._affinity.drop_lease()
        except AffinityAway as error:
            log.warning("lease left to expire; Redis is away", reason=str(error))

    # --- owned tasks -----------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        try:
            leases, others = await self._affinity.replicas(), await self._affinity.others()
        except AffinityAway as error:
            self.balancer.lost(error)
            return
        self.balancer.found(others)
        self.fleet.look(leases)

    async def _look_forever(self) -> None:
        while True:
            await asyncio.sleep(self.config.registry_interval)
            await self._look()

    async def _sweep_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._server.limits.sweep_seconds)
            now = loop.time()
            self._server.sweep(now)
            self._pool.sweep(now)

    async def _keep_lease(self) -> None:
        while True:
            await self._put_lease()
            self.balancer.refresh_load()
            await asyncio.sleep(min(1.0, self.config.lease_seconds / 3))

    async def _put_lease(self) -> None:
        lease = Lease(
            id=self.id,
            role="router",
            address=self.address,
            metrics=self.metrics_address or self.address,
            state="draining" if self._server.draining else "ready",
            inflight=sum(self.balancer.open.values()),
            pid=os.getpid(),
            host=socket.gethostname(),
        )
        try:
            await self._affinity.keep_lease(lease)
        except AffinityAway as error:
            self.balancer.lost(error)

    def _gauges(self) -> Mapping[str, float]:
        return {
            names.ROUTER_READY_REPLICAS: len(self.fleet.view.ready),
            names.ROUTER_CONNECTIONS: len(self._server.connections),
            names.ROUTER_REDIS_AWAY: float(self.balancer.away),
            names.ROUTER_KNOWN_SESSIONS: len(self.balancer.bindings),
        }
