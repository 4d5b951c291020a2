"""From a commit to training samples: fetch the rollouts a rank needs, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from rollstream.core.bus import Bus
from rollstream.core.errors import EXIT_USAGE, RollstreamError
from rollstream.core.wire import Batch, MalformedRecord, Rollout, Sample, decode_as, digest
from rollstream.trainer.samples import BadSample, TrainSample

IN_FLIGHT = 64
"""Requests to the bus at once."""


class RolloutMissing(RollstreamError):
    """A committed rollout is not on the bus, or is not the one that was committed."""

    exit_code = EXIT_USAGE


def lengths(batch: Batch) -> list[int]:
    """Tokens of each sample, known from the commit alone."""
    return [sample.advantages.shape[0] for sample in batch.samples]


async def fetch_samples(bus: Bus, batch: Batch, indices: Iterable[int]) -> dict[int, TrainSample]:
    """The samples ``indices`` of ``batch``, with spilled arrays filled in.

    Raises :class:`RolloutMissing` or ``BadSample``, naming step and rollout.
    """
    wanted = sorted(indices)
    mine = await bus.resolve(msgspec.structs.replace(batch, samples=tuple(batch.samples[index] for index in wanted)))
    gate = asyncio.Semaphore(IN_FLIGHT)

    async def fetch(subject: str, expected: str) -> tuple[str, Rollout]:
        async with gate:
            stored = await bus.get(subject)
            if stored is None:
                raise RolloutMissing(
                    f"step {batch.step}: rollout {subject} is committed, but not on the bus",
                    hint="was ROLLOUTS purged by hand? resume from a checkpoint that covers this step",
                )
            return subject, await bus.resolve(open_rollout(subject, stored.data, expected, batch.step))

    subjects = {sample.subject: sample.digest for sample in mine.samples}
    rollouts = dict(await asyncio.gather(*(fetch(subject, expected) for subject, expected in subjects.items())))
    return {
        index: join(batch.step, sample, rollouts[sample.subject])
        for index, sample in zip(wanted, mine.samples, strict=True)
    }


def open_rollout(subject: str, data: bytes, expected: str, step: int) -> Rollout:
    """The rollout in ``data``; raises :class:`RolloutMissing` unless its digest is the committed one."""
    found = digest(data)
    if found != expected:
        raise RolloutMissing(
            f"step {step}: rollout {subject} has digest {found[:16]}, the commit names {expected[:16]}",
            hint="the record was replaced or damaged: restore the store, or resume from an earlier checkpoint",
        )
    try:
        return decode_as(Rollout, data, where=subject)
    except MalformedRecord as error:
        raise RolloutMissing(f"step {step}: {error}") from error


def join(step: int, sample: Sample, rollout: Rollout) -> TrainSample:
    """The training sample of a committed sample and its rollout, both resolved."""
    if not 0 <= sample.branch < len(rollout.branches):
        raise BadSample(f"step {step}: {sample.subject} has no branch {sample.branch}")
    try:
        return TrainSample.from_wire(sample, rollout.branches[sample.branch])
    except BadSample as error:
        raise BadSample(f"step {step}: {error}") from error
