"""Batches for tests of the commit chain."""

from __future__ import annotations

from rollstream.core.bus import CommitChain
from rollstream.core.wire import Array, Batch, OrchestratorState, Sample

PER_BATCH = 2


def next_batch(chain: CommitChain) -> Batch:
    """The batch that an orchestrator would commit: the next rollouts that the head's state has not used."""
    first = chain.head.state.cursors.get("s", 0)
    samples = tuple(
        Sample(subject=f"t{chain.head.timeline}.r{index}", digest="d", branch=0, advantages=Array.of([0.0], "f4"))
        for index in range(first, first + PER_BATCH)
    )
    step = chain.head.step + 1
    state = OrchestratorState(cursors={"s": first + PER_BATCH})
    return Batch(step=step, version=step - 1, samples=samples, state=state, **chain.batch_fields())  # type: ignore[arg-type]
