"""One model of where a run stands; the live screen, plain lines and ``status`` only render it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollstream.cli.metrics_file import MetricsFile
from rollstream.cli.plot import eval_rewards
from rollstream.core.telemetry import names

LIMITS = ("max_lead", "max_off_policy_steps", "max_inflight_episodes")
"""What can hold the orchestrator back by configuration: its wait reasons, and the tails of its pacing metrics."""


@dataclass(frozen=True)
class Wait:
    """A component that waits: for what, for how long, and how many seconds are left until its deadline, if any."""

    component: str
    id: str
    reason: str
    seconds: float
    left: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class Member:
    """A process with a lease in the registry."""

    role: str
    id: str
    state: str
    version: int = 0
    inflight: int = 0
    kv_usage: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class Facts:
    """What bus and store say. ``problem`` tells what could not be asked."""

    phase: str = "created"
    paused: bool = False
    reason: str = ""
    committed: int = 0
    newest_version: int = 0
    members: Sequence[Member] = ()
    waits: Sequence[Wait] = ()
    problem: str = ""


@dataclass(frozen=True)
class Snapshot:
    """Where a run stands. Rewards and rates are None until the first step has been measured."""

    run: str
    phase: str
    paused: bool
    reason: str
    step: int
    max_steps: int
    committed: int
    newest_version: int
    reward: float | None
    rewards: tuple[float, ...]
    evals: dict[str, tuple[tuple[int, float], ...]]
    lag_mean: float | None
    lag_max: float | None
    tokens_per_second: float | None
    step_seconds: float | None
    wait_for_batch_seconds: float | None
    grad_norm: float | None
    mismatch_kl: float | None
    entropy: float | None
    limit: str | None
    members: tuple[Member, ...]
    waits: tuple[Wait, ...]
    restarts: int
    elapsed: float
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return dataclasses.asdict(self)


def take_snapshot(
    run: str, max_steps: int, metrics: MetricsFile, facts: Facts, *, restarts: int = 0, elapsed: float = 0.0
) -> Snapshot:
    """Put the pieces together. ``metrics`` is read as it stands (refresh it first)."""
    rewards = metrics.series(names.REWARD_MEAN)
    trained = [step for step, _ in metrics.series(names.GRAD_NORM)] or [0]
    return Snapshot(
        run=run,
        phase=facts.phase,
        paused=facts.paused,
        reason=facts.reason,
        step=max(trained[-1], facts.newest_version),
        max_steps=max_steps,
        committed=max(facts.committed, rewards[-1][0] if rewards else 0),
        newest_version=max(facts.newest_version, trained[-1]),
        reward=rewards[-1][1] if rewards else None,
        rewards=tuple(value for _, value in rewards),
        evals={name: tuple(metrics.series(name)) for name in sorted(eval_rewards(metrics))},
        lag_mean=metrics.latest(names.OFF_POLICY_MEAN),
        lag_max=metrics.latest(names.OFF_POLICY_MAX),
        tokens_per_second=metrics.latest(names.THROUGHPUT),
        step_seconds=metrics.latest(names.STEP_TIME),
        wait_for_batch_seconds=metrics.latest(names.WAIT_TIME),
        grad_norm=metrics.latest(names.GRAD_NORM),
        mismatch_kl=metrics.latest(names.MISMATCH_KL),
        entropy=metrics.latest(names.ENTROPY),
        limit=binding_limit(metrics, facts),
        members=tuple(facts.members),
        waits=tuple(facts.waits),
        restarts=restarts,
        elapsed=elapsed,
        problem=facts.problem,
    )


def binding_limit(metrics: MetricsFile, facts: Facts) -> str | None:
    """The limit that the orchestrator waits for now; else the one that held it back longest before the last batch."""
    for wait in facts.waits:
        if wait.component == "orchestrator" and wait.reason in LIMITS:
            return wait.reason
    last = metrics.steps.get(max(metrics.steps, default=0), {})
    held = {limit: float(last.get(names.limit_seconds(limit), 0.0)) for limit in LIMITS}
    longest = max(held, key=lambda limit: held[limit])
    return longest if held[longest] > 0 else None


def one_line(snapshot: Snapshot) -> str:
    """The run in one line of text, for logs and pipes."""
    ready = [member for member in snapshot.members if member.role == "inference" and member.state == "ready"]
    parts = [
        f"step {snapshot.step}/{snapshot.max_steps}",
        f"reward {number(snapshot.reward)}",
        f"lag {number(snapshot.lag_mean, 1)} (max {number(snapshot.lag_max, 0)})",
        f"v{snapshot.newest_version} on {versions(ready)}",
        f"{number(snapshot.tokens_per_second, 0)} tok/s",
        f"{number(snapshot.step_seconds, 1)} s/step",
    ]
    if snapshot.limit:
        parts.append(f"limit {snapshot.limit}")
    if snapshot.restarts:
        parts.append(f"{snapshot.restarts} restarts")
    parts += [f"waits: {waiting(wait)}" for wait in longest_waits(snapshot)]
    if snapshot.phase not in ("running", "created"):
        parts.insert(0, snapshot.phase)
    return " · ".join(parts)


def longest_waits(snapshot: Snapshot, count: int = 2) -> list[Wait]:
    """The waits that an operator should see first: those that last longest, limits aside."""
    waits = [wait for wait in snapshot.waits if wait.reason not in LIMITS and wait.seconds >= 2.0]
    return sorted(waits, key=lambda wait: -wait.seconds)[:count]


def waiting(wait: Wait) -> str:
    """``trainer: batch, batch 5 (3 s)``: who, for what, in its own words, since when."""
    detail = f", {wait.detail}" if wait.detail and wait.detail != wait.reason else ""
    return f"{wait.component}: {wait.reason}{detail} ({wait.seconds:.0f} s)"


def versions(members: Sequence[Member]) -> str:
    """Which policy versions the replicas serve."""
    held = sorted({member.version for member in members})
    return ", ".join(f"v{version}" for version in held) if held else "no replica"


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none yet."""
    return "–" if value is None else f"{value:,.{digits}f}"
