"""The last message of a stream has no successor that would betray its loss; a full stream still tells what it holds."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from rollstream.cli.servers import EmbeddedNats
from rollstream.core.bus import Bus, StreamSettings
from support.rollouts import make_group

WITHIN = 20.0


async def write_groups(bus: Bus, indices: range) -> None:
    for index in indices:
        group = make_group(index)
        await bus.put_once(bus.subjects.group(group.group), group)


@pytest.mark.parametrize(("limit", "timeout"), [(1, 1.0), (64, 2.0), (256, 5.0)], ids=str)
async def test_the_last_message_is_read_again_when_its_delivery_was_swallowed(
    bus: Bus, limit: int, timeout: float
) -> None:
    await write_groups(bus, range(3))
    async with bus.read("GROUPS") as reader:
        assert len(await reader.batch(3, 5.0)) == 3
        await write_groups(bus, range(3, 5))
        [consumer] = await bus.js.consumers_info(bus.subjects.stream("GROUPS"))
        thief = await bus.js.pull_subscribe_bind(consumer=consumer.name, stream=bus.subjects.stream("GROUPS"))
        assert len(await thief.fetch(2, timeout=2.0)) == 2, "the server counts these as delivered"
        taken: list[int] = []
        async with asyncio.timeout(WITHIN):
            while len(taken) < 2:
                taken += [stored.seq for stored in await reader.batch(limit, timeout)]
    assert taken == [4, 5]


async def test_a_connection_cut_in_mid_delivery_loses_no_last_message(bus: Bus) -> None:
    """The server itself lives on, and so does the consumer that counts the lost messages as delivered."""
    async with bus.read("GROUPS") as reader, asyncio.timeout(60):
        await write_groups(bus, range(1))
        taken = [stored.seq for stored in await reader.batch(1, 5.0)]
        for round_ in range(1, 13):
            reading = asyncio.create_task(reader.batch(4, 3.0))
            await asyncio.sleep(0.002 * (round_ % 4))
            writing = asyncio.create_task(write_groups(bus, range(round_, round_ + 1)))
            await asyncio.sleep(0.001 * (round_ % 6))
            transport = bus.client._transport
            if transport is not None:
                with suppress(OSError):
                    transport.close()
            await writing
            taken += [stored.seq for stored in await reading]
            while len(taken) < round_ + 1:
                taken += [stored.seq for stored in await reader.batch(4, 1.0)]
    assert taken == list(range(1, 14))


async def test_a_record_that_stands_on_a_full_stream_is_not_waited_for(nats_server: EmbeddedNats, run_id: str) -> None:
    """A lost acknowledgement of the very record that filled the stream must not wait for room."""
    waits: list[str] = []
    bus = await Bus.connect(nats_server.url, run_id, name="test", on_wait=waits.append)
    await bus.create_streams(StreamSettings(max_bytes=8 * 1024))
    index = 0
    with pytest.raises(Exception, match="maximum bytes"):
        while True:
            group = make_group(index)
            await bus.put_once(bus.subjects.group(group.group), group, deadline=0.0)
            index += 1
    assert index > 2
    waits.clear()
    last = make_group(index - 1)
    async with asyncio.timeout(5):
        again = await bus.put_once(bus.subjects.group(last.group), last)
    assert again.created and not waits
    await bus.close()


async def test_many_writers_of_one_subject_and_one_wins(bus: Bus) -> None:
    records = [make_group(7, size=size) for size in range(2, 34)]
    subject = bus.subjects.group(records[0].group)
    results = await asyncio.gather(*(bus.put_once(subject, record) for record in records))
    assert sum(result.created for result in results) == 1
    assert len({result.stored for result in results}) == 1
    assert await bus.last_sequence("GROUPS") == 1
