"""Rollouts and groups made by hand, for tests of the orchestrator's pure parts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollstream.core.wire import Array, Branch, Group, Rollout, RolloutError, Sampling, VersionSpan


def make_branch(
    prompt: int = 3, sampled: int = 4, *, version: int = 0, trainable: bool = True,
    spans: Sequence[tuple[int, int, int]] = (),
) -> Branch:
    """A prompt and a completion; ``spans`` are (version, start, end), by default one span of ``version``."""
    total = prompt + sampled
    mask = np.arange(total) >= prompt
    entries = spans or ([(version, prompt, total)] if sampled else [])
    return Branch(
        token_ids=Array.of(np.arange(total), "<i4"),
        sampled=Array.of(mask, "|b1"),
        logprobs=Array.of(np.where(mask, -0.5, 0.0), "<f4"),
        temperature=1.0,
        spans=tuple(VersionSpan(timeline=1, version=number, start=start, end=end) for number, start, end in entries),
        trainable=trainable,
    )


def make_group(index: int = 0, *, size: int = 4, source: str = "words", kind: str = "train") -> Group:
    return Group(
        group=f"t1-{source}-{index:06d}", kind=kind, source=source, task=index, size=size,  # type: ignore[arg-type]
        sampling=Sampling(), timeline=1, created=0,
    )


def make_rollout(
    group: Group, member: int, reward: float | None = 1.0, *, branches: Sequence[Branch] | None = None,
    version: int = 0, error: str | None = None,
) -> Rollout:
    """A rollout of ``member``; with ``error`` it has neither branches nor a reward."""
    if error is not None:
        branches, reward = (), None
    return Rollout(
        group=group.group, member=member, kind=group.kind, source=group.source, task=group.task, timeline=1,
        worker="w", branches=tuple([make_branch(version=version)] if branches is None else branches), reward=reward,
        started=0, finished=1_000_000_000,
        error=None if error is None else RolloutError(kind=error, message="it broke"),
    )
