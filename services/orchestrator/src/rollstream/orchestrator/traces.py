"""Readable traces: rollouts/step_<n>/{train,eval}.jsonl in the run directory, one rollout a line."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rollstream.core.wire import Sample
from rollstream.orchestrator.groups import Received

logger = logging.getLogger(__name__)


def trace_line(received: Received, advantage: float | None) -> bytes:
    """One rollout as a JSON line: what was asked, what was said, what it earned, and by which versions."""
    rollout = received.rollout
    line: dict[str, Any] = {
        "group": rollout.group,
        "member": rollout.member,
        "source": rollout.source,
        "task": rollout.task,
        "reward": rollout.reward,
        "reward_parts": rollout.reward_parts,
        "metrics": rollout.metrics,
        "advantage": advantage,
        "versions": [received.oldest, received.newest],
        "tokens": [len(branch.token_ids.numpy()) for branch in rollout.branches],
        "stop": rollout.stop,
        "truncated": rollout.truncated,
        "turns": rollout.turns,
        "seconds": round((rollout.finished - rollout.started) / 1e9, 4),
        "worker": rollout.worker,
        "messages": rollout.messages,
    }
    if rollout.error is not None:
        line["error"] = {"kind": rollout.error.kind, "message": rollout.error.message}
    return msgspec.json.encode(line) + b"\n"


def advantages_by_subject(samples: Iterable[Sample]) -> dict[str, float]:
    """Mean advantage over the sampled tokens that have one, for readers; 0 where there is none."""
    found: dict[str, float] = {}
    for sample in samples:
        values = sample.advantages.numpy()
        nonzero = values[values != 0]
        found[sample.subject] = float(np.mean(nonzero, dtype=np.float64)) if len(nonzero) else 0.0
    return found


class TraceWriter:
    """Writes trace files one after another, off the event loop.

    Traces are for readers, not for the run: a file that cannot be written costs a warning. ``run`` is to be owned by
    the service's task owner; ``close`` lets it finish what is queued.
    """

    def __init__(self, root: Path, *, queued: int = 64) -> None:
        self._root = root
        self._queue: asyncio.Queue[tuple[str, list[Received], Mapping[str, float]] | None] = asyncio.Queue(queued)

    def write(self, step: int, kind: str, rollouts: list[Received], advantages: Mapping[str, float]) -> None:
        """Queue one file; dropped with a warning when the disk cannot keep up."""
        try:
            self._queue.put_nowait((f"step_{step}/{kind}.jsonl", rollouts, advantages))
        except asyncio.QueueFull:
            logger.warning("rollout traces of step %d were not written: the disk cannot keep up", step)

    async def run(self) -> None:
        while (entry := await self._queue.get()) is not None:
            name, rollouts, advantages = entry
            try:
                await asyncio.to_thread(self._write, self._root / name, rollouts, advantages)
            except OSError as error:
                logger.warning("rollout traces %s were not written: %s", name, error)

    async def close(self) -> None:
        await self._queue.put(None)

    @staticmethod
    def _write(path: Path, rollouts: list[Received], advantages: Mapping[str, float]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.writelines(trace_line(received, advantages.get(received.subject)) for received in rollouts)
