"""What rank 0 tells the ranks to do next; travels between them as a broadcast object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Train:
    """Train on this commit: the exact bytes of a batch record, its stream sequence and digest."""

    commit: bytes
    seq: int
    digest: str


@dataclass(frozen=True)
class SaveCheckpoint:
    """Write a checkpoint of the present step."""


@dataclass(frozen=True)
class Wait:
    """Nothing to do yet; keeps the other ranks' broadcast from timing out."""


@dataclass(frozen=True)
class Finish:
    """The run's last step is trained: final checkpoint, then end well."""


@dataclass(frozen=True)
class Stop:
    """End before the run is complete (a signal, or the run failed)."""

    reason: str
    checkpoint: bool


Decision = Train | SaveCheckpoint | Wait | Finish | Stop
