"""The archive of the chain: exact bytes, self-contained, and no flipped byte goes unseen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgpack
import msgspec
import numpy as np
import pytest

from rollstream.core.run import ArchiveDamaged, BatchArchive, archived_steps, read_archive, write_archive
from rollstream.core.wire import Array, Batch, OrchestratorState, Sample, WeightNotice, digest, encode
from support.rollouts import make_branch, make_group, make_rollout

STEP = 7


@dataclass
class Made:
    archive: BatchArchive
    path: Path


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Step 7 of two rollouts, the second one with an array in a blob (as small as can be: every byte is flipped)."""
    branch = make_branch()
    blobs = {digest(branch.token_ids.data): branch.token_ids.data}
    spilled = msgspec.structs.replace(branch.token_ids, data=b"", blob=next(iter(blobs)))
    branches = [[branch], [msgspec.structs.replace(branch, token_ids=spilled)]]
    rollouts = {
        f"rs.x.rollouts.train.g.{member}": encode(make_rollout(make_group(1), member, branches=branches[member]))
        for member in (0, 1)
    }
    samples = tuple(
        Sample(subject=subject, digest=digest(data), branch=0, advantages=Array.of(np.ones(7), "<f4"))
        for subject, data in rollouts.items()
    )
    commit = encode(
        Batch(
            timeline=1, epoch=1, created=1, previous="", step=STEP, version=STEP - 1, samples=samples,
            state=OrchestratorState(),
        )
    )  # fmt: skip
    notice = encode(
        WeightNotice(
            timeline=1, version=STEP, transport="filesystem", location="weights/1/v7", nbytes=1, digest="0" * 64,
            commit=digest(commit), created=1,
        )
    )  # fmt: skip
    archive = BatchArchive(step=STEP, timeline=1, commit=commit, rollouts=rollouts, blobs=blobs, notice=notice)
    path = tmp_path / "batches" / f"step_{STEP}.msgpack"
    write_archive(path, archive)
    return Made(archive, path)


def test_it_is_read_back_byte_for_byte(made: Made) -> None:
    archive = read_archive(made.path)
    archive.verify()
    assert msgspec.structs.replace(archive, checksum="") == made.archive
    assert archive.batch().step == STEP and archive.weight_notice().version == STEP
    plain = msgpack.unpackb(made.path.read_bytes())
    assert plain["commit"] == made.archive.commit and plain["rollouts"] == made.archive.rollouts


def test_every_flipped_byte_is_seen_and_the_step_named(made: Made) -> None:
    whole = made.path.read_bytes()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        made.path.write_bytes(flipped)
        with pytest.raises(ArchiveDamaged, match="step 7"):
            read_archive(made.path).verify()


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_a_cut_file_is_seen(made: Made, length: int) -> None:
    made.path.write_bytes(made.path.read_bytes()[:length])
    with pytest.raises(ArchiveDamaged, match="step 7"):
        read_archive(made.path)


def test_what_is_missing_or_foreign_is_named(made: Made) -> None:
    def damage(**changes: object) -> BatchArchive:
        return msgspec.structs.replace(made.archive, **changes)

    first, second = made.archive.rollouts
    [blob] = made.archive.blobs
    cases = {
        f"rollout {second} is missing": damage(rollouts={first: made.archive.rollouts[first]}),
        f"rollout {first} differs": damage(rollouts={**made.archive.rollouts, first: b"\x80"}),
        f"blob {blob} is missing": damage(blobs={}),
        f"blob {blob} holds other bytes": damage(blobs={blob: b"x"}),
        "the file holds the commit of step 7": damage(step=8),
        "not a rollstream record": damage(commit=b"\x80"),
        "expected Batch": damage(commit=made.archive.notice),
        "is not the one that was trained": damage(
            notice=encode(msgspec.structs.replace(made.archive.weight_notice(), commit="f" * 64))
        ),
    }
    for message, archive in cases.items():
        with pytest.raises(ArchiveDamaged, match=message):
            archive.verify()


def test_the_file_of_another_step_is_not_taken(made: Made) -> None:
    other = made.path.with_name("step_8.msgpack")
    made.path.rename(other)
    with pytest.raises(ArchiveDamaged, match=r"step 8: .* holds step 7"):
        read_archive(other)
    with pytest.raises(ArchiveDamaged, match=r"step 7: .* cannot be read"):
        read_archive(made.path)


def test_only_whole_archives_are_listed(made: Made) -> None:
    directory = made.path.parent
    write_archive(directory / "step_10.msgpack", msgspec.structs.replace(made.archive, step=10))
    for foreign in (".step_3.msgpack.1a2b.tmp", "step_03.msgpack", "step_0.msgpack", "step_4.msgpack.bak", "README"):
        (directory / foreign).write_bytes(b"")
    assert archived_steps(directory) == [7, 10]
    assert archived_steps(directory / "none") == []
