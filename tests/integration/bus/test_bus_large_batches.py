"""A batch of a thousand rollouts goes through the chain and comes back whole."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from rollstream.core.bus import Bus
from rollstream.core.wire import Array, Batch, OrchestratorState, Sample


@pytest.mark.parametrize(("count", "length"), [(1024, 200), (512, 4000)])
async def test_a_large_batch_is_committed_and_resolved(bus: Bus, count: int, length: int) -> None:
    chain = await bus.chain()
    await chain.take("one")
    samples = tuple(
        Sample(subject=f"{bus.subjects.prefix}.rollouts.train.g{index}.0", digest="c" * 64, branch=0,
               advantages=Array.of(np.full(length, index + 1), np.float32))
        for index in range(count)
    )  # fmt: skip
    batch = Batch(step=1, version=0, samples=samples, state=OrchestratorState(), **chain.batch_fields())  # type: ignore[arg-type]

    stalls: list[float] = []

    async def beat() -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            stalls.append(time.monotonic() - before)

    beating = asyncio.create_task(beat())
    await chain.append(batch)
    found = await bus.chain_reader().next(10.0)
    assert found is not None
    whole = await bus.resolve(found[1])
    beating.cancel()
    for index, sample in enumerate(whole.samples):
        values = sample.advantages.numpy()
        assert values.shape == (length,) and (values == index + 1).all()
    assert max(stalls) < 3.0, "the event loop, and with it every heartbeat, stood still"
