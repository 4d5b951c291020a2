"""Metric names of the orchestrator (those that others share are declared in ``core.telemetry.names``)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

REWARD_EFFECTIVE = "train/agg/effective/agent/reward"
OUTPUT_TOKENS = "train/agg/effective/agent/output_tokens"
OFF_POLICY_MEAN = "off_policy/mean"
OFF_POLICY_MAX = "off_policy/max"
OFF_POLICY_IN_FLIGHT = "off_policy/in_flight/mean"
BATCH_GROUPS = "batch/groups"
BATCH_ROLLOUTS = "batch/rollouts"
BATCH_TRAINED = "batch/trained"
BATCH_ERRORED = "batch/errored"
BATCH_TRUNCATED = "batch/truncated"
BATCH_ZERO_ADVANTAGE = "batch/zero_advantage"
EPISODE_SECONDS = "time/episode"
COMMIT_SECONDS = "time/commit"
DROPPED_STALE = "dropped/stale"
DROPPED_FAILED = "dropped/failed"


def summary(prefix: str, values: npt.NDArray[np.float64]) -> dict[str, float]:
    """Mean, standard deviation, smallest and largest under ``prefix``."""
    return {
        f"{prefix}/mean": float(values.mean()),
        f"{prefix}/std": float(values.std()),
        f"{prefix}/min": float(values.min()),
        f"{prefix}/max": float(values.max()),
    }


def reward_of_source(source: str) -> str:
    """Mean reward of one training source."""
    return f"train/{source}/effective/agent/reward/mean"


def solve_rate(kind: str) -> str:
    """Share of groups that are solved by all, none or some members."""
    return f"train/agg/effective/agent/solve_{kind}"


def eval_metric(source: str, name: str) -> str:
    """A score of an evaluation."""
    return f"eval/{source}/{name}"


def limit_seconds(limit: str) -> str:
    """Seconds since the last batch during which ``limit`` kept the next group from being dispatched."""
    return f"pacing/{limit}/seconds"
