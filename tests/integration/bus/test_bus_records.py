"""Records, blobs, readers and leases on a real nats-server, through restarts."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from rollstream.cli.servers import EmbeddedNats
from rollstream.core.bus import Bus, BusUnavailable, StreamMismatch, StreamSettings
from rollstream.core.wire import Array, Branch, Episode, Group, Rollout, Sampling, VersionSpan


def make_group(name: str, size: int = 2) -> Group:
    return Group(group=name, kind="train", source="s", task=1, size=size, sampling=Sampling(), timeline=1, created=1)


def make_episode(group: str, member: int) -> Episode:
    return Episode(group=group, member=member, kind="train", source="s", task=1, sampling=Sampling(), timeline=1)


def make_rollout(group: str, member: int, tokens: int = 5, reward: float = 0.5) -> Rollout:
    branch = Branch(
        token_ids=Array.of(np.arange(tokens), np.int32),
        sampled=Array.of(np.arange(tokens) > 1),
        logprobs=Array.of(-np.arange(tokens) / 10, np.float32),
        temperature=1.0,
        spans=(VersionSpan(timeline=1, version=0, start=2, end=tokens),),
    )
    return Rollout(
        group=group, member=member, kind="train", source="s", task=1, timeline=1, worker="w", branches=(branch,),
        reward=reward, started=1, finished=2,
    )  # fmt: skip


async def test_first_write_wins(bus: Bus) -> None:
    subject = bus.subjects.rollout("train", "g", 0)
    first = await bus.put_once(subject, make_rollout("g", 0, reward=0.1))
    second = await bus.put_once(subject, make_rollout("g", 0, reward=0.9))
    again = await bus.put_once(subject, make_rollout("g", 0, reward=0.1))
    assert first.created
    assert not second.created
    assert again.created  # equal bytes are the same write
    assert second.stored == first.stored == again.stored
    assert (await bus.get(subject)) == first.stored
    assert await bus.get(bus.subjects.rollout("train", "g", 1)) is None


async def test_large_arrays_are_spilled_and_resolved(bus: Bus) -> None:
    big = make_rollout("g", 0, tokens=300_000)
    stored = (await bus.put_once(bus.subjects.rollout("train", "g", 0), big)).stored
    assert len(stored.data) < 512 * 1024
    record = stored.record
    assert isinstance(record, Rollout)
    with pytest.raises(ValueError, match="resolve it"):
        record.branches[0].token_ids.numpy()
    whole = await bus.resolve(record)
    assert np.array_equal(whole.branches[0].token_ids.numpy(), np.arange(300_000))
    assert whole == big


async def test_reader_is_ordered_and_survives_a_killed_server(bus: Bus, nats_server: EmbeddedNats) -> None:
    names = [f"g{index}" for index in range(40)]
    seen: list[str] = []

    async def read() -> None:
        async with bus.read("GROUPS") as reader:
            while len(seen) < len(names):
                for stored in await reader.batch(8, 5.0):
                    record = stored.record
                    assert isinstance(record, Group)
                    seen.append(record.group)

    reading = asyncio.create_task(read())
    for index, name in enumerate(names):
        if index in (13, 27):
            nats_server.kill()
            nats_server.start()
        assert (await bus.put_once(bus.subjects.group(name), make_group(name))).stored.seq == index + 1
    await asyncio.wait_for(reading, 30)
    assert seen == names


async def test_purge_below_and_by_subject(bus: Bus) -> None:
    for index in range(6):
        await bus.put_once(bus.subjects.group(f"g{index}"), make_group(f"g{index}"))
    await bus.purge_below("GROUPS", 3)
    assert await bus.first_sequence("GROUPS") == 3
    await bus.purge_below("GROUPS", 2)  # going back is no error and removes nothing
    assert await bus.first_sequence("GROUPS") == 3
    await bus.purge_subject("GROUPS", bus.subjects.group("g4"))
    assert await bus.get(bus.subjects.group("g4")) is None


async def test_lease_is_redelivered_unless_it_beats(bus: Bus) -> None:
    queue = bus.episodes("s", lease_seconds=1.0)
    for member in (0, 1):
        await bus.put_once(bus.subjects.episode("s", "g", member), make_episode("g", member))
    first, second = await queue.pull(2, 5.0)
    async with first.heartbeat():
        await asyncio.sleep(2.0)
        again = await queue.pull(2, 1.0)
    assert [(lease.episode.member, lease.deliveries) for lease in again] == [(second.episode.member, 2)]
    await first.ack()
    await again[0].ack()
    assert await queue.pull(1, 0.5) == []
    info = await bus.js.stream_info(bus.subjects.stream("EPISODES"))
    assert info.state.messages == 0


async def test_other_settings_are_refused(bus: Bus) -> None:
    with pytest.raises(StreamMismatch, match="max_bytes"):
        await bus.verify_streams(StreamSettings(max_bytes=1 << 20))
    await bus.verify_streams()
    queue = bus.episodes("s", lease_seconds=1.0)
    await queue.pull(1, 0.1)
    with pytest.raises(StreamMismatch, match="ack_wait"):
        await bus.episodes("s", lease_seconds=9.0).pull(1, 0.1)


async def test_full_stream_is_back_pressure(nats_server: EmbeddedNats, run_id: str) -> None:
    waits: list[str] = []
    bus = await Bus.connect(nats_server.url, run_id, name="test", on_wait=waits.append)
    await bus.create_streams(StreamSettings(max_bytes=64 * 1024))
    writing = asyncio.create_task(_fill(bus, [make_rollout("g", member, tokens=2000) for member in range(6)]))
    while "bus_full" not in waits:
        assert not writing.done()
        await asyncio.sleep(0.05)
    await bus.purge_subject("ROLLOUTS", bus.subjects.rollout("train", "g", 0))
    await bus.purge_subject("ROLLOUTS", bus.subjects.rollout("train", "g", 1))
    await bus.purge_subject("ROLLOUTS", bus.subjects.rollout("train", "g", 2))
    await asyncio.wait_for(writing, 20)
    assert await bus.last_sequence("ROLLOUTS") == 6
    await bus.close()


async def _fill(bus: Bus, rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        await bus.put_once(bus.subjects.rollout("train", rollout.group, rollout.member), rollout)


async def test_unreachable_server_is_named() -> None:
    started = time.monotonic()
    with pytest.raises(BusUnavailable, match=r"127\.0\.0\.1:1 does not answer"):
        await Bus.connect("nats://127.0.0.1:1", "r", name="test", connect_timeout=1.0)
    assert time.monotonic() - started < 10
