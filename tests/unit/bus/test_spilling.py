"""Records that are too large for one message: as few arrays as will do go into blobs, quickly."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.core.bus import RecordTooLarge
from rollstream.core.bus.blobs import RECORD_LIMIT, arrays_of, map_arrays, spill
from rollstream.core.wire import Array, Batch, OrchestratorState, Sample, decode, digest, encode


def make_batch(lengths: list[int]) -> Batch:
    """One sample a length, with advantages that no two samples share."""
    samples = tuple(
        Sample(
            subject=f"rs.0123456789ab.rollouts.train.t1-source-{index // 8:06d}.{index % 8}", digest="c" * 64, branch=0,
            advantages=Array.of(np.full(length, index + 1), np.float32),
        )
        for index, length in enumerate(lengths)
    )  # fmt: skip
    return Batch(
        timeline=1, epoch=1, created=1, previous="", step=1, version=0, samples=samples, state=OrchestratorState()
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 31, 32, 33, 250, 3000, 20_000, 70_000]), min_size=1, max_size=400))
def test_what_is_spilled_fits_resolves_and_is_no_more_than_needed(lengths: list[int]) -> None:
    batch = make_batch(lengths)
    spilled, data, blobs = spill(batch)
    assert len(data) < RECORD_LIMIT and decode(data) == spilled
    assert all(digest(held) == name for name, held in blobs.items())
    assert {array.blob for array in arrays_of(spilled) if array.blob} == set(blobs)
    back = map_arrays(
        spilled, lambda array: Array(array.dtype, array.shape, blobs[array.blob]) if array.blob else array
    )
    assert back == batch
    assert spill(batch)[1] == data, "a retry writes the same bytes"
    if blobs:
        least = min(map(len, blobs.values()))
        kept = map_arrays(
            spilled,
            lambda array: (
                Array(array.dtype, array.shape, held)
                if array.blob and len(held := blobs[array.blob]) == least
                else array
            ),
        )
        assert len(encode(kept)) > RECORD_LIMIT - 4096, "the smallest of them could have stayed"


@pytest.mark.parametrize(("count", "low", "high"), [(512, 20, 255), (1024, 200, 255), (1024, 100, 8192)])
def test_large_batches_of_any_length_fit_within_a_second_or_two(count: int, low: int, high: int) -> None:
    """One encoding for each distinct size took 20 s, with the event loop standing; short ones did not fit at all."""
    batch = make_batch([int(length) for length in np.random.default_rng(0).integers(low, high, count)])
    started = time.process_time()
    _, data, _ = spill(batch)
    assert time.process_time() - started < 5.0
    assert len(data) < RECORD_LIMIT


def test_a_record_that_cannot_fit_is_named_with_a_way_out() -> None:
    with pytest.raises(RecordTooLarge, match=r"a Batch of \d+ bytes does not fit") as refused:
        spill(make_batch([64] * 4096))
    assert "groups_per_batch" in str(refused.value)


def test_a_record_without_arrays_is_named_too() -> None:
    batch = make_batch([])
    huge = Batch(
        timeline=1, epoch=1, created=1, previous="", step=1, version=0, samples=(), rejected=("x" * 600_000,),
        state=batch.state,
    )  # fmt: skip
    with pytest.raises(RecordTooLarge, match="with its 0 arrays"):
        spill(huge)
