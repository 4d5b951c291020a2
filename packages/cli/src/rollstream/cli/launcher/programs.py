"""The programs of a run: what is started, with which configuration, and where it logs."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rollstream.cli.attempt import Attempt
from rollstream.cli.launcher.process import Program

MODULES = {
    "inference": "rollstream.inference.main",
    "router": "rollstream.router.main",
    "trainer": "rollstream.trainer.main",
    "orchestrator": "rollstream.orchestrator.main",
    "env-worker": "rollstream.orchestrator.worker.main",
}
"""Role → the module that runs it; a child process imports it, this one never does."""

FINITE = frozenset({"trainer", "orchestrator"})
"""Roles whose exit code 0 means that their part of the run is complete."""


def role(component: str) -> str:
    """Role of a component name: ``inference-0`` → ``inference``."""
    head, _, tail = component.rpartition("-")
    return head if tail.isdigit() else component


def programs(attempt: Attempt, components: Iterable[str]) -> list[Program]:
    """One program a component, each with its resolved configuration of this attempt."""
    return [
        Program(
            name=component,
            argv=(sys.executable, "-m", MODULES[role(component)], "@", str(attempt.resolved(component))),
            log=attempt.log(component),
            finite=role(component) in FINITE,
        )
        for component in components
    ]
