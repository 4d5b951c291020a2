"""Every subject and stream name of a run, declared once.

A run's names hang under ``rs.<run>.``; each token passes :func:`token`, so a name with dots, blanks or wildcards can
never change the shape of a subject.
"""

from __future__ import annotations

import string
from dataclasses import dataclass

from rollstream.core.wire.records import Kind

_PLAIN = frozenset(string.ascii_letters + string.digits + "-_")


def token(name: str) -> str:
    """One subject token: letters, digits, ``-`` and ``_`` stay, other bytes become ``=XX``. Injective; "" is ``=``."""
    if not name:
        return "="
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"={byte:02X}" for byte in name.encode())


def group_id(kind: Kind, timeline: int, source: str, index: int, version: int | None = None) -> str:
    """Deterministic group name: the ``index``-th group of ``source`` on ``timeline`` (evals: of ``version``)."""
    head = f"t{timeline}-{token(source)}-{index:06d}"
    return head if kind == "train" else f"e{version}-{head}"


@dataclass(frozen=True)
class Subjects:
    """Subjects and stream names of one run. ``run`` is the random run_id of run.json."""

    run: str

    @property
    def prefix(self) -> str:
        return f"rs.{token(self.run)}"

    def stream(self, name: str) -> str:
        """JetStream name of stream ``name`` (GROUPS, EPISODES, …)."""
        return f"RS_{token(self.run)}_{name}"

    @property
    def intent_bucket(self) -> str:
        """KV bucket with phase, paused, desired scale, config digest."""
        return f"RS_{token(self.run)}_INTENT"

    def group(self, group: str) -> str:
        return f"{self.prefix}.groups.{token(group)}"

    def episode(self, source: str, group: str, member: int) -> str:
        return f"{self.prefix}.episodes.{token(source)}.{token(group)}.{member}"

    def episodes_of(self, source: str) -> str:
        return f"{self.prefix}.episodes.{token(source)}.>"

    def episodes_of_group(self, source: str, group: str) -> str:
        return f"{self.prefix}.episodes.{token(source)}.{token(group)}.>"

    def rollout(self, kind: Kind, group: str, member: int) -> str:
        return f"{self.prefix}.rollouts.{kind}.{token(group)}.{member}"

    def blob(self, sha256: str, index: int) -> str:
        return f"{self.prefix}.blobs.{sha256}.{index}"

    @property
    def commits(self) -> str:
        return f"{self.prefix}.commits"

    def weights(self, timeline: int, version: int) -> str:
        return f"{self.prefix}.weights.{timeline}.{version}"

    def weights_of(self, timeline: int) -> str:
        return f"{self.prefix}.weights.{timeline}.>"

    def event(self, kind: str) -> str:
        return f"{self.prefix}.events.{token(kind)}"

    def command(self, component: str, name: str) -> str:
        """Request/reply subject (no stream): ``name`` is checkpoint, drain, stop, …"""
        return f"{self.prefix}.commands.{token(component)}.{token(name)}"

    def everything(self, name: str) -> str:
        """The wildcard that stream ``name`` captures."""
        family = name.lower()
        return f"{self.prefix}.{family}" if family == "commits" else f"{self.prefix}.{family}.>"
