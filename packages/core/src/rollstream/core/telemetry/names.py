"""Every metric name, declared once. They are the names that this field's dashboards know."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# --- what a batch is made of (orchestrator) ---
_EFFECTIVE = "train/agg/effective/agent"
REWARD_EFFECTIVE = f"{_EFFECTIVE}/reward"
REWARD_MEAN = f"{REWARD_EFFECTIVE}/mean"
OUTPUT_TOKENS = f"{_EFFECTIVE}/output_tokens"
BATCH_GROUPS = "batch/groups"
BATCH_ROLLOUTS = "batch/rollouts"
BATCH_TRAINED = "batch/trained"
BATCH_ERRORED = "batch/errored"
BATCH_TRUNCATED = "batch/truncated"
BATCH_ZERO_ADVANTAGE = "batch/zero_advantage"
DROPPED_STALE = "batch/dropped_stale"
DROPPED_FAILED = "batch/dropped_failed"

# --- staleness, in versions ---
OFF_POLICY_MEAN = "off_policy/mean"
OFF_POLICY_MAX = "off_policy/max"
OFF_POLICY_IN_FLIGHT = "off_policy/in_flight"

# --- optimisation (trainer) ---
LOSS = "loss/mean"
LOSS_RL = "loss/rl"
LOSS_CE = "loss/ce"
LOSS_REF_KL = "loss/ref_kl"
MISMATCH_KL = "mismatch_kl/all/mean"
ENTROPY = "entropy/all/mean"
MASKED = "masked/all/mean"
TOKENS = "train/tokens"
TOKENS_TRAINED = "train/tokens_in_loss"
GRAD_NORM = "optim/grad_norm"
LEARNING_RATE = "optim/lr"

# --- speed: seconds, and tokens a second ---
THROUGHPUT = "perf/throughput"
STEP_TIME = "time/step"
WAIT_TIME = "time/wait_for_batch"
FETCH_TIME = "time/fetch_rollouts"
FORWARD_BACKWARD_TIME = "time/forward_backward"
PUBLISH_TIME = "time/publish_weights"
CHECKPOINT_TIME = "time/checkpoint"
EPISODE_SECONDS = "time/episode"
COMMIT_SECONDS = "time/between_commits"

# --- router (Prometheus) ---
ROUTER = "rollstream_router"
ROUTER_REQUESTS = f"{ROUTER}_requests"
ROUTER_RETRIES = f"{ROUTER}_retries"
ROUTER_UPSTREAM_FAILURES = f"{ROUTER}_upstream_failures"
ROUTER_BROKEN_ANSWERS = f"{ROUTER}_broken_answers"
ROUTER_OPEN_REQUESTS = f"{ROUTER}_open_requests"
ROUTER_READY_REPLICAS = f"{ROUTER}_ready_replicas"
ROUTER_CONNECTIONS = f"{ROUTER}_connections"
ROUTER_REDIS_AWAY = f"{ROUTER}_redis_away"
ROUTER_KNOWN_SESSIONS = f"{ROUTER}_known_sessions"


def summary(prefix: str, values: npt.NDArray[np.float64]) -> dict[str, float]:
    """``prefix/{mean,std,min,max}`` of at least one value."""
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
    """Share of the groups solved by ``all``, ``none`` or ``some`` of their members."""
    return f"{_EFFECTIVE}/solve_{kind}"


def eval_metric(source: str, name: str) -> str:
    """A held-out metric: ``reward/mean``, ``avg@k``, ``pass@k``."""
    return f"eval/{source}/{name}"


def limit_seconds(limit: str) -> str:
    """Seconds that pacing limit ``limit`` held the dispatcher or the committer back."""
    return f"pacing/{limit}/seconds"
