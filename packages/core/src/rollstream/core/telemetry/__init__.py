"""Telemetry: logs, metrics.jsonl, W&B, Prometheus, and every metric name."""

from rollstream.core.redaction import redact
from rollstream.core.telemetry import names
from rollstream.core.telemetry.logs import configure_logging
from rollstream.core.telemetry.monitors import FileMonitor, Monitor, MonitorGroup, WandbMonitor
from rollstream.core.telemetry.prometheus import PrometheusServer

__all__ = [
    "FileMonitor",
    "Monitor",
    "MonitorGroup",
    "PrometheusServer",
    "WandbMonitor",
    "configure_logging",
    "names",
    "redact",
]
