"""The replica's agent: follows weight notices, keeps a lease, tells what happens. The engine is the replica's."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog
from redis.exceptions import RedisError

from rollstream.core.bus import Bus
from rollstream.core.config import InferenceConfig
from rollstream.core.errors import RollstreamError
from rollstream.core.run import RunDir
from rollstream.core.store import Lease, Store
from rollstream.core.tasks import TaskOwner
from rollstream.core.wire import Event, MalformedRecord, WeightNotice
from rollstream.inference.client import EngineRefused
from rollstream.inference.engine import EngineProcess
from rollstream.inference.metrics import ReplicaMetrics
from rollstream.inference.replica import Replica, key

log = structlog.get_logger(__name__)

STORE_SECONDS = 2.0
"""Longest single call to Redis or to the engine's status route; a late one is left out of this beat."""


@dataclass
class Load:
    """The engine's load as of the last beat that it answered."""

    inflight: int = 0
    kv_usage: float = 0.0
    capacity: int = 0


class Agent:
    """One replica process.

    Lifecycle: :meth:`serve` starts the engine, follows WEIGHTS and renews the lease until ``stop`` is set; then it
    leaves the routing, drains, drops the lease and stops the engine. The tasks it owns end with it; if one of them
    fails, :meth:`serve` fails. Invariant: the lease says ``ready`` only while the replica is.
    """

    def __init__(
        self, config: InferenceConfig, replica_id: str, bus: Bus, store: Store, run_dir: RunDir, engine: EngineProcess
    ) -> None:
        self._config = config
        self._bus = bus
        self._store = store
        self._engine = engine
        self._changed = asyncio.Event()
        self._events: asyncio.Queue[Event] = asyncio.Queue(maxsize=1000)
        self._load = Load()
        self._store_away = False
        self.id = replica_id
        self.metrics_address = ""
        self.metrics = ReplicaMetrics()
        self.replica = Replica(engine, run_dir.path, config.load_timeout, self._report, self._changed.set)

    async def serve(self, stop: asyncio.Event) -> None:
        """Serve until ``stop`` is set. Raises ``EngineFailed`` when the first engine does not start."""
        try:
            async with TaskOwner() as owner:
                owner.start(self._follow(), "weight notices")
                owner.start(self._publish_events(), "events")
                engine = owner.start(self.replica.run(), "engine")
                beat = owner.start(self._beat(), "lease")
                await stop.wait()
                log.info("draining", replica=self.id)
                await self.replica.drain(self._config.drain_timeout)
                beat.cancel()
                await self._leave()
                engine.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await engine
                owner.cancel()
        finally:
            await self._engine.stop()

    # --- weights ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Tell the replica the newest of what was announced; what a batch overtakes is never loaded."""
        async with self._bus.weights.follow() as reader:
            while True:
                found = await reader.batch(512, timeout=2.0)
                notices = [_notice(stored) for stored in found]
                if notices:
                    self.replica.notice(max(notices, key=key))

    # --- lease -----------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._changed.clear()
            await self._measure()
            await self._put_lease()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.heartbeat):
                    await self._changed.wait()

    async def _measure(self) -> None:
        client = self.replica.client
        if client is None:
            self._load = Load()
        else:
            with contextlib.suppress(EngineRefused):
                status = await client.status(timeout=STORE_SECONDS)
                self._load = Load(int(status["in_flight"]), float(status["kv_usage"]), int(status["capacity"]))
        self.metrics.observe(self.replica, self._load.inflight, self._load.kv_usage)

    def lease(self) -> Lease:
        """What the registry should say of this replica now."""
        loaded = self.replica.loaded
        return Lease(
            id=self.id,
            role="inference",
            address=reachable(self._engine.url) if self.replica.client else "",
            metrics=self.metrics_address,
            model=self._config.model.name,
            state=self.replica.state,
            timeline=loaded.timeline if loaded else 0,
            version=loaded.version if loaded else -1,
            capacity=self._load.capacity,
            inflight=self._load.inflight,
            kv_usage=self._load.kv_usage,
            pid=os.getpid(),
            host=socket.gethostname(),
            detail=self.replica.reason.splitlines()[0] if self.replica.reason else "",
        )

    async def _put_lease(self) -> None:
        lease = self.lease()
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._store.registry.put(lease, self._config.lease_seconds)
                await self._say_progress(lease)
        except (RedisError, OSError, TimeoutError) as error:
            if not self._store_away:
                log.warning("Redis does not answer; the lease is renewed when it does", error=str(error))
            self._store_away = True
            return
        if self._store_away:
            log.info("Redis answers again")
        self._store_away = False

    async def _say_progress(self, lease: Lease) -> None:
        progress = self._store.progress
        if lease.state == "ready":
            await progress.working("inference", self.id, f"serves v{lease.version} of timeline {lease.timeline}")
        else:
            await progress.waiting("inference", self.id, self.replica.waits_for, None, lease.detail)

    async def _leave(self) -> None:
        try:
            async with asyncio.timeout(STORE_SECONDS):
                await self._store.registry.drop("inference", self.id)
        except (RedisError, OSError, TimeoutError) as error:
            log.warning("the lease is left to expire; Redis does not answer", error=str(error))

    # --- events ----------------------------------------------------------------------------------------------------

    def _report(self, kind: str, message: str, level: Literal["info", "warning", "error"]) -> None:
        getattr(log, level)(message, event_kind=kind, replica=self.id)
        self.metrics.count(kind)
        data: dict[str, Any] = {"replica": self.id}
        event = Event(
            kind=kind, component="inference", message=message, level=level, data=data, created=time.time_ns()
        )
        with contextlib.suppress(asyncio.QueueFull):  # events are best effort; the log has them all
            self._events.put_nowait(event)

    async def _publish_events(self) -> None:
        while True:
            await self._bus.publish_event(await self._events.get())


def reachable(url: str) -> str:
    """``url`` with a host that others can connect to, where it names every interface."""
    parts = urlsplit(url)
    if parts.hostname in ("0.0.0.0", "::"):
        return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"
    return url


def _notice(stored: Any) -> WeightNotice:
    try:
        record = stored.record
    except MalformedRecord as error:
        raise RollstreamError(str(error), hint="remove this message from the stream; it is no weight notice") from error
    if not isinstance(record, WeightNotice):
        raise RollstreamError(
            f"{stored.subject} (sequence {stored.seq}) holds a {type(record).__name__}",
            hint="remove this message from the stream; only weight notices belong there",
        )
    return record
