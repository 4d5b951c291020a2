"""What the router counts: plain integers on the hot path, Prometheus metrics when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollstream.core.telemetry import names

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class Stats:
    """Counters of one router since its start."""

    __slots__ = ("answers", "broken_answers", "replies", "retries", "upstream_failures")

    def __init__(self) -> None:
        self.answers: dict[int, int] = {}
        """Answers of replicas that were forwarded whole, by status."""
        self.replies: dict[int, int] = {}
        """Answers of the router's own, by status."""
        self.retries = 0
        self.upstream_failures = 0
        self.broken_answers = 0
        """Answers that broke off after their first byte."""

    def count(self, status: int) -> None:
        """One forwarded answer."""
        self.answers[status] = self.answers.get(status, 0) + 1

    def count_reply(self, status: int) -> None:
        """One answer of the router's own."""
        self.replies[status] = self.replies.get(status, 0) + 1


class RouterCollector(Collector):
    """Turns ``Stats`` and the gauges of the moment into Prometheus metrics."""

    def __init__(
        self, stats: Stats, gauges: Callable[[], Mapping[str, float]], open: Callable[[], Mapping[str, int]]
    ) -> None:
        self._stats = stats
        self._gauges = gauges
        self._open = open

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        answers = CounterMetricFamily(
            names.ROUTER_REQUESTS, "Answers by source and status.", labels=["source", "status"]
        )
        for source, by_status in (("replica", stats.answers), ("router", stats.replies)):
            for status, count in sorted(by_status.items()):
                answers.add_metric([source, str(status)], count)
        yield answers
        yield CounterMetricFamily(names.ROUTER_RETRIES, "Attempts on another replica.", value=stats.retries)
        yield CounterMetricFamily(
            names.ROUTER_UPSTREAM_FAILURES, "Attempts that a replica failed.", value=stats.upstream_failures
        )
        yield CounterMetricFamily(
            names.ROUTER_BROKEN_ANSWERS,
            "Answers that broke off after the first byte.",
            value=stats.broken_answers,
        )
        load = GaugeMetricFamily(names.ROUTER_OPEN_REQUESTS, "Open requests of this router.", labels=["replica"])
        for replica, count in sorted(self._open().items()):
            load.add_metric([replica], count)
        yield load
        for name, value in self._gauges().items():
            yield GaugeMetricFamily(name, name.removeprefix(names.ROUTER + "_").replace("_", " "), value=value)


def exposition(registry: CollectorRegistry) -> bytes:
    """The registry in Prometheus text format."""
    return generate_latest(registry)
