"""What the trainer shows to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from rollstream.trainer.measure import StepTimes
from rollstream.trainer.step import StepResult


class Gauges:
    """Counters and gauges of one trainer, in a registry of their own."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._step = Gauge("rollstream_trainer_step", "Last trained step", registry=registry)
        self._steps = Counter("rollstream_trainer_steps", "Steps trained by this process", registry=registry)
        self._tokens = Counter("rollstream_trainer_tokens", "Tokens trained by this process", registry=registry)
        self._busy = Counter("rollstream_trainer_busy_seconds", "Seconds spent on steps", registry=registry)
        self._waited = Counter("rollstream_trainer_wait_seconds", "Seconds without a batch", registry=registry)
        self._norm = Gauge("rollstream_trainer_grad_norm", "Gradient norm of the last step", registry=registry)
        self._kl = Gauge("rollstream_trainer_mismatch_kl", "Mismatch KL of the last step", registry=registry)

    def measured(self, step: int, result: StepResult, times: StepTimes) -> None:
        """Take one step's figures."""
        self._step.set(step)
        self._steps.inc()
        self._tokens.inc(result.tokens)
        self._busy.inc(times.busy)
        self._waited.inc(max(0.0, times.wait))
        self._norm.set(result.grad_norm)
        self._kl.set(result.mismatch_kl)
