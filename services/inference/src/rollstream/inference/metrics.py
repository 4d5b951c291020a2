"""The replica's Prometheus metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from rollstream.inference.replica import Replica

STATES = ("starting", "loading", "ready", "failed", "draining")


class ReplicaMetrics:
    """Metrics of one replica in a registry of their own; :meth:`observe` at each beat, :meth:`count` at each event."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._state = Gauge("rollstream_replica_state", "1 for the present state", ["state"], registry=self.registry)
        self._version = Gauge("rollstream_replica_version", "Policy version that is loaded", registry=self.registry)
        self._behind = Gauge(
            "rollstream_replica_versions_behind", "Announced versions that are not loaded", registry=self.registry
        )
        self._inflight = Gauge("rollstream_replica_inflight", "Requests in the engine", registry=self.registry)
        self._kv = Gauge("rollstream_replica_kv_usage", "Share of the KV cache in use", registry=self.registry)
        self._restarts = Gauge("rollstream_replica_restarts", "Engine restarts of this agent", registry=self.registry)
        self._events = Counter(
            "rollstream_replica_events", "Events by kind (weights_loaded, …)", ["kind"], registry=self.registry
        )

    def observe(self, replica: Replica, inflight: int, kv_usage: float) -> None:
        """Take the present figures; ``kv_usage`` in [0, 1]."""
        for state in STATES:
            self._state.labels(state).set(state == replica.state)
        loaded, newest = replica.loaded, replica.newest
        if loaded is not None:
            self._version.set(loaded.version)
        if loaded is not None and newest is not None and newest.timeline == loaded.timeline:
            self._behind.set(newest.version - loaded.version)
        self._inflight.set(inflight)
        self._kv.set(kv_usage)
        self._restarts.set(replica.restarts)

    def count(self, kind: str) -> None:
        """One more event of ``kind``."""
        self._events.labels(kind).inc()
