"""What the orchestrator waits for, from whom, and which pacing limit binds: pure, for status and the live view."""

from __future__ import annotations

from dataclasses import dataclass

from rollstream.core.config import OrchestratorConfig
from rollstream.orchestrator.ledger import Ledger
from rollstream.orchestrator.pacing import may_commit


@dataclass(frozen=True)
class Waiting:
    """``reason`` is a fixed word, ``detail`` a sentence that names numbers and the binding limit."""

    reason: str
    detail: str


def what_it_waits_for(config: OrchestratorConfig, ledger: Ledger, *, paused: bool, holds: bool) -> Waiting:
    """The one thing that the next batch (or the end) waits for."""
    step = ledger.committed + 1
    if ledger.newest < 0:
        return Waiting("base_weights", "waits for the trainer to announce v0")
    if ledger.committed >= config.max_steps:
        if ledger.newest < config.max_steps:
            return Waiting("last_version", f"waits for the trainer: v{ledger.newest} of v{config.max_steps}")
        missing = sum(run.missing for run in ledger.evaluating.values())
        return Waiting("evaluation", f"waits for {missing} episodes of the last evaluation")
    ready = len(ledger.table.ready())
    limit = f"; dispatch is limited by {ledger.binding}" if ledger.binding else ""
    state = f"batch {step}: {ready} of {config.groups_per_batch} groups, {ledger.table.episodes} episodes open"
    if holds:
        missing = sum(run.missing for run in ledger.evaluating.values())
        return Waiting("evaluation", f"{state}; waits for {missing} episodes of the base model's evaluation")
    if ready >= config.groups_per_batch and not may_commit(step, ledger.newest, config.max_lead):
        needed = step - 1 - config.max_lead
        return Waiting("max_lead", f"{state}; waits for the trainer: v{ledger.newest}, needs v{needed}{limit}")
    if paused:
        return Waiting("paused", f"{state}; the run is paused")
    return Waiting("rollouts", f"{state}; waits for env workers{limit}")
