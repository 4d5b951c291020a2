"""Prometheus: the ledger and the worker's pool as gauges, read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily

Values = Callable[[], Mapping[str, tuple[str, float]]]
"""Name → (help, value), as of now."""


class _Gauges:
    def __init__(self, values: Values) -> None:
        self._values = values

    def collect(self) -> Iterator[GaugeMetricFamily]:
        for name, (text, value) in self._values().items():
            family = GaugeMetricFamily(f"rollstream_{name}", text)
            family.add_metric([], value)
            yield family


def gauges(values: Values) -> CollectorRegistry:
    """A registry of its own with one gauge a value."""
    registry = CollectorRegistry()
    registry.register(_Gauges(values))
    return registry
