"""The metrics of one step under the field's names."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from rollstream.core.telemetry import names
from rollstream.trainer.step import StepResult


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step: waiting for its batch, fetching its rollouts, training, publishing the weights."""

    wait: float
    fetch: float
    train: float
    publish: float

    @property
    def busy(self) -> float:
        return self.fetch + self.train + self.publish


def step_metrics(result: StepResult, times: StepTimes, batch: dict[str, float]) -> dict[str, float]:
    """One line of metrics: what the orchestrator put into the batch, and what training it measured."""
    return {
        **batch,
        names.LOSS: result.loss,
        names.LOSS_RL: result.loss_rl,
        names.LOSS_CE: result.loss_ce,
        names.LOSS_REF_KL: result.loss_ref_kl,
        names.MISMATCH_KL: result.mismatch_kl,
        names.ENTROPY: result.entropy,
        names.MASKED: result.dropped,
        names.GRAD_NORM: result.grad_norm,
        names.LEARNING_RATE: result.lr,
        names.TOKENS: float(result.tokens),
        names.TOKENS_TRAINED: float(result.trained_tokens),
        names.THROUGHPUT: result.tokens / max(1e-9, times.wait + times.busy),
        names.STEP_TIME: times.busy,
        names.WAIT_TIME: times.wait,
        names.FETCH_TIME: times.fetch,
        names.FORWARD_BACKWARD_TIME: times.train,
        names.PUBLISH_TIME: times.publish,
    }


def logged_steps(path: Path) -> set[int]:
    """Steps that an earlier life of the trainer has measured in metrics.jsonl: a crash replay does not repeat them."""
    steps: set[int] = set()
    if not path.is_file():
        return steps
    with path.open("rb") as file:
        for line in file:
            try:
                row = json.loads(line)
            except ValueError:
                continue  # a line that a dying process cut off
            if isinstance(row, dict) and names.GRAD_NORM in row:
                steps.add(int(row.get("step", 0)))
    return steps
