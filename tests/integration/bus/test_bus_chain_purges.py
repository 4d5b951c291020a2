"""The commit chain while a checkpoint purges it: who reads meanwhile goes on, what cannot go on says so at once."""

from __future__ import annotations

import asyncio

import pytest

from rollstream.core.bus import Bus, ChainBroken, ChainRewound, CommitChain, Stored
from rollstream.core.wire import OrchestratorState, Rewind
from support.chains import next_batch


async def grow(chain: CommitChain, steps: int) -> Stored:
    for _ in range(steps):
        stored = await chain.append(next_batch(chain))
    return stored


async def started(bus: Bus, steps: int) -> tuple[CommitChain, Stored]:
    chain = await bus.chain()
    await chain.take("one")
    return chain, await grow(chain, steps)


async def rewind(chain: CommitChain, step: int) -> Stored:
    fields = chain.batch_fields() | {"timeline": chain.head.timeline + 1}
    return await chain.append(
        Rewind(parent=chain.head.timeline, from_step=step, state=OrchestratorState(), **fields)  # type: ignore[arg-type]
    )


async def test_a_purge_while_an_orchestrator_starts(bus: Bus) -> None:
    chain, _ = await started(bus, 1)
    successor = await bus.chain()
    covered = await grow(chain, 3)
    await bus.purge_below("COMMITS", covered.seq)
    await successor.take("two")
    assert (successor.head.step, successor.head.epoch) == (4, 2)
    assert successor.head.state == chain.head.state
    await grow(successor, 1)


async def test_a_purge_while_a_trainer_catches_up(bus: Bus) -> None:
    chain, _ = await started(bus, 3)
    reader = bus.chain_reader(after_step=3)
    assert await reader.next(0.5) is None
    await grow(chain, 2)
    trained = bus.chain_reader(after_step=5)
    assert await trained.next(0.5) is None
    covered = await grow(chain, 1)
    await bus.purge_below("COMMITS", covered.seq)
    found = await trained.next(5.0)
    assert found is not None and found[1].step == 6 and found[0] == covered
    async with asyncio.timeout(10):
        with pytest.raises(ChainBroken, match="expected step 4 on COMMITS, found step 6"):
            await reader.next(8.0)
    await reader.close()
    await trained.close()


async def test_a_damaged_chain_is_not_taken_for_a_purged_one(bus: Bus) -> None:
    await started(bus, 4)
    await bus.js.delete_msg(bus.subjects.stream("COMMITS"), 3)
    with pytest.raises(ChainBroken, match=r"COMMITS 4 \(Batch\): its previous"):
        await bus.chain()
    with pytest.raises(ChainBroken, match=r"COMMITS 4 \(Batch\): its previous"):
        await bus.chain_reader().next(5.0)


async def test_a_chain_without_its_state_is_refused(bus: Bus) -> None:
    """Starting again from step 1 would train every rollout twice."""
    chain, _ = await started(bus, 2)
    await chain.take("two")
    await bus.purge_below("COMMITS", chain.head.seq)
    with pytest.raises(ChainBroken, match="state of the run"):
        await bus.chain()
    await bus.purge_below("COMMITS", chain.head.seq + 1)
    async with asyncio.timeout(10):
        with pytest.raises(ChainBroken, match="COMMITS is empty"):
            await bus.chain()


async def test_a_trainer_on_a_void_timeline_is_told_though_the_rewind_was_purged(bus: Bus) -> None:
    chain, _ = await started(bus, 5)
    await rewind(chain, 2)
    covered = await grow(chain, 3)
    await bus.purge_below("COMMITS", covered.seq)
    await grow(chain, 1)
    assert (found := await bus.chain_reader(after_step=5, timeline=2).next(5.0)) is not None
    assert (found[1].timeline, found[1].step) == (2, 6)
    with pytest.raises(ChainRewound, match="begins on timeline 2"):
        await bus.chain_reader(after_step=5, timeline=1).next(5.0)


async def test_a_store_older_than_the_checkpoint_is_told(bus: Bus) -> None:
    await started(bus, 2)
    with pytest.raises(ChainBroken, match=r"stands at step 7 .* ends at step 2"):
        await bus.chain_reader(after_step=7).next(5.0)
