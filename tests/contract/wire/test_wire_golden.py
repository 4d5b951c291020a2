"""Golden bytes of every record: a change of the wire shows here, and must be a new tag instead."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollstream.core.wire import (
    AnyRecord,
    Array,
    Batch,
    Branch,
    Episode,
    Epoch,
    Event,
    Group,
    MalformedRecord,
    OpenGroup,
    OrchestratorState,
    Rewind,
    Rollout,
    RolloutError,
    Sample,
    Sampling,
    VersionSpan,
    WeightNotice,
    decode,
    decode_as,
    encode,
)

GOLDEN = Path(__file__).with_name("golden.json")

BRANCH = Branch(
    token_ids=Array.of([5, 6, 7], np.int32),
    sampled=Array.of([False, True, True]),
    logprobs=Array.of([0.0, -0.5, -1.25], np.float32),
    temperature=0.7,
    spans=(VersionSpan(timeline=1, version=3, start=1, end=2), VersionSpan(timeline=1, version=4, start=2, end=3)),
    extras={"routed_experts": Array.of([[1, 2], [3, 4], [5, 6]], np.uint8)},
)
STATE = OrchestratorState(
    cursors={"b": 2, "a": 9}, rng=b"\x01", curriculum={"a": b"\x02"}, baselines={"agent": 0.5},
    open_groups=(OpenGroup(group="g", source="a", task=4, size=8),), low_water=17, evals={"a": 3},
)  # fmt: skip
CHAIN = {"timeline": 1, "epoch": 2, "created": 1_700_000_000_000_000_000, "previous": "ab" * 32}
RECORDS: dict[str, AnyRecord] = {
    "group": Group(
        group="t1-a-000001", kind="train", source="a", task=4, size=8, timeline=1, created=1,
        sampling=Sampling(temperature=0.7, max_tokens=16, seed=3, extra={"y": 1, "x": 2}), sampler_state=b"\x00",
    ),
    "episode": Episode(
        group="t1-a-000001", member=2, kind="eval", source="a", task=4, sampling=Sampling(), timeline=1, min_version=3
    ),
    "rollout": Rollout(
        group="t1-a-000001", member=2, kind="train", source="a", task=4, timeline=1, worker="w", branches=(BRANCH,),
        reward=0.75, reward_parts={"similarity": 0.75}, metrics={"m": 1.0}, stop="stop", started=1, finished=2,
        timing={"model": 0.5}, messages=({"role": "user", "content": "hi"},),
    ),
    "rollout_error": Rollout(
        group="g", member=0, kind="train", source="a", task=4, timeline=1, worker="w", branches=(), reward=None,
        started=1, finished=2, error=RolloutError(kind="TimeoutError", message="too slow"),
    ),
    "epoch": Epoch(writer="host-1", **CHAIN),
    "batch": Batch(
        step=4, version=3, state=STATE, rejected=("rs.r.rollouts.train.g.1",), metrics={"off_policy/max": 1.0},
        samples=(
            Sample(
                subject="rs.r.rollouts.train.g.0", digest="cd" * 32, branch=0,
                advantages=Array.of([0, 0.5, 0.5], np.float32), ce_weights=Array.of([0, 0, 0.1], np.float32),
            ),
        ),
        **CHAIN,
    ),
    "rewind": Rewind(parent=1, from_step=3, state=STATE, **(CHAIN | {"timeline": 2})),
    "weights": WeightNotice(
        timeline=1, version=4, transport="filesystem", location="weights/1/v4", nbytes=10, digest="ef" * 32,
        commit="12" * 32, created=1,
    ),
    "event": Event(
        kind="replica_failed", component="inference-0", message="m", level="error", data={"v": 4}, created=1
    ),
    "spilled": Rollout(
        group="g", member=0, kind="train", source="a", task=4, timeline=1, worker="w", reward=0.0, started=1,
        finished=2,
        branches=(Branch(
            token_ids=Array(dtype="<i4", shape=(9,), blob="ab" * 32), sampled=Array.of([True] * 9),
            logprobs=Array.of([-1.0] * 9, np.float32), temperature=1.0, spans=(),
        ),),
    ),
}  # fmt: skip


def golden() -> dict[str, str]:
    loaded: dict[str, str] = json.loads(GOLDEN.read_text())
    return loaded


def test_every_type_has_a_golden() -> None:
    assert set(golden()) == set(RECORDS)
    assert {type(record) for record in RECORDS.values()} == set(AnyRecord.__args__)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_bytes_are_golden_and_decode_to_the_record(name: str) -> None:
    data = bytes.fromhex(golden()[name])
    assert encode(RECORDS[name]).hex() == data.hex()
    assert decode(data) == RECORDS[name]


def test_encoding_does_not_depend_on_the_order_of_dicts() -> None:
    one = Event(kind="k", component="c", message="m", data={"a": 1, "b": 2}, created=1)
    other = Event(kind="k", component="c", message="m", data={"b": 2, "a": 1}, created=1)
    assert encode(one) == encode(other)


def test_unknown_fields_are_ignored_and_malformed_bytes_are_named() -> None:
    import msgpack

    fields = msgpack.unpackb(encode(RECORDS["epoch"])) | {"later": 1}
    assert decode(msgpack.packb(fields)) == RECORDS["epoch"]
    for bad in (b"", b"\xc1", b"\x80", msgpack.packb({"type": "nonsense.v1"}), msgpack.packb({"type": "epoch.v1"})):
        with pytest.raises(MalformedRecord, match="COMMITS 7"):
            decode(bad, where="COMMITS 7")
    with pytest.raises(MalformedRecord, match="expected Batch, found Epoch"):
        decode_as(Batch, encode(RECORDS["epoch"]))


@pytest.mark.parametrize("dtype", ["<i4", "<f4", "|b1", "|u1", "<f8", "<i8", ">f4"])
def test_arrays_travel_little_endian(dtype: str) -> None:
    values = np.arange(6).reshape(2, 3).astype(dtype)
    array = Array.of(values)
    assert array.dtype[0] in "<|"
    assert np.array_equal(array.numpy(), values)
    assert array.nbytes == len(array.data)


def test_arrays_refuse_what_cannot_travel() -> None:
    with pytest.raises(TypeError, match="cannot travel"):
        Array.of(np.array(["a"]))
    with pytest.raises(ValueError, match="wants 8 bytes"):
        Array(dtype="<f4", shape=(2,), data=b"\x00" * 4).numpy()
