"""What the bus does when its server, its streams or its consumers are not what they were: no gap, no silent wait."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from rollstream.cli.servers import EmbeddedNats
from rollstream.core.bus import (
    Bus,
    BusClosed,
    BusUnavailable,
    ChainBroken,
    RecordsLost,
    StaleWriter,
    StreamMismatch,
    StreamMissing,
)
from rollstream.core.wire import Episode, Sampling, encode
from support.chains import next_batch
from support.rollouts import make_group
from support.until import until

WITHIN = 15.0
FAULTS = {
    "put": lambda bus: bus.put_once(bus.subjects.group("x"), make_group(1)),
    "get": lambda bus: bus.get(bus.subjects.group("x")),
    "last sequence": lambda bus: bus.last_sequence("GROUPS"),
    "purge": lambda bus: bus.purge_subject("GROUPS", bus.subjects.group("x")),
    "read": lambda bus: keep_asking(lambda: bus.read("GROUPS").batch(8, 1.0)),
    "lease": lambda bus: keep_asking(lambda: bus.episodes("s", lease_seconds=1.0).pull(8, 1.0)),
}


async def keep_asking(ask: Callable[[], Awaitable[object]]) -> None:
    while True:
        await ask()


async def write_groups(bus: Bus, indices: range) -> None:
    for index in indices:
        group = make_group(index)
        await bus.put_once(bus.subjects.group(group.group), group)


async def write_episodes(bus: Bus, members: range) -> None:
    for member in members:
        episode = Episode(group="g", member=member, kind="train", source="s", task=0, sampling=Sampling(), timeline=1)
        await bus.put_once(bus.subjects.episode("s", "g", member), episode)


async def only_consumer(bus: Bus, stream: str) -> str:
    [info] = await bus.js.consumers_info(bus.subjects.stream(stream))
    return str(info.name)


# --- readers and leases ----------------------------------------------------------------------------------------------


async def test_what_a_broken_delivery_swallowed_is_read_again(bus: Bus) -> None:
    await write_groups(bus, range(10))
    async with bus.read("GROUPS") as reader:
        taken = [stored.seq for stored in await reader.batch(3, 5.0)]
        thief = await bus.js.pull_subscribe_bind(
            consumer=await only_consumer(bus, "GROUPS"), stream=bus.subjects.stream("GROUPS")
        )
        assert len(await thief.fetch(4, timeout=2.0)) == 4, "the server counts these as delivered"
        async with asyncio.timeout(WITHIN):
            while len(taken) < 10:
                taken += [stored.seq for stored in await reader.batch(3, 1.0)]
    assert taken == list(range(1, 11))


async def test_a_cancelled_read_loses_nothing(bus: Bus) -> None:
    async with bus.read("GROUPS") as reader, asyncio.timeout(60):
        writing = asyncio.create_task(write_groups(bus, range(150)))
        taken: list[int] = []
        for attempt in range(400):
            reading = asyncio.create_task(reader.batch(16, 2.0))
            await asyncio.wait([reading], timeout=0.001 * (attempt % 12))
            reading.cancel()
            with suppress(asyncio.CancelledError):
                taken += [stored.seq for stored in await reading]
        await writing
        while len(taken) < 150:
            taken += [stored.seq for stored in await reader.batch(64, 1.0)]
    assert taken == list(range(1, 151))


@pytest.mark.parametrize("limit", [1, 8])
async def test_deleted_consumers_are_made_anew(bus: Bus, limit: int) -> None:
    await write_groups(bus, range(3))
    await write_episodes(bus, range(3))
    queue, reader = bus.episodes("s", lease_seconds=30.0), bus.read("GROUPS")
    first = await queue.pull(1, 5.0)
    await first[0].ack()
    assert (await reader.next(5.0)) is not None
    for stream in ("EPISODES", "GROUPS"):
        await bus.js.delete_consumer(bus.subjects.stream(stream), await only_consumer(bus, stream))
    members: set[int] = set()
    positions: list[int] = []
    async with asyncio.timeout(WITHIN):
        while len(members) < 2 or len(positions) < 2:
            members |= {lease.episode.member for lease in await queue.pull(limit, 1.0)}
            positions += [stored.seq for stored in await reader.batch(limit, 0.5)]
    assert members == {0, 1, 2} - {first[0].episode.member}
    assert positions == [2, 3]
    await reader.close()
    await queue.close()


# --- what will never come back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", FAULTS)
async def test_a_deleted_stream_is_named_instead_of_waited_for(bus: Bus, action: str) -> None:
    await bus.delete_streams()
    async with asyncio.timeout(WITHIN):
        with pytest.raises(StreamMissing, match=bus.run):
            await FAULTS[action](bus)


@pytest.mark.parametrize("action", FAULTS)
async def test_a_connection_that_the_server_ends_for_good_is_told(bus: Bus, action: str) -> None:
    bus.client._transport.write(b"NONSENSE\r\n")  # the client gives up after such an error
    await until(lambda: bus.client.is_closed)
    async with asyncio.timeout(WITHIN):
        with pytest.raises(BusClosed, match="for good"):
            await FAULTS[action](bus)


async def test_streams_made_anew_under_a_reader_and_a_writer_are_noticed(bus: Bus) -> None:
    await write_groups(bus, range(5))
    chain = await bus.chain()
    await chain.take("one")
    await chain.append(next_batch(chain))
    reader, batches = bus.read("GROUPS"), bus.chain_reader()
    assert len(await reader.batch(5, 5.0)) == 5
    assert await batches.next(5.0) is not None
    await bus.delete_streams()
    await bus.create_streams()
    await write_groups(bus, range(2))
    async with asyncio.timeout(60):
        with pytest.raises(RecordsLost, match="ends at sequence 2, this process has read up to 5"):
            await keep_asking(lambda: reader.batch(8, 1.0))
        with pytest.raises(RecordsLost):
            await keep_asking(lambda: batches.next(1.0))
        with pytest.raises(RecordsLost):
            await chain.append(next_batch(chain))


async def test_a_chain_that_was_purged_by_hand_ends_its_writer(bus: Bus) -> None:
    chain = await bus.chain()
    await chain.take("one")
    await bus.purge_below("COMMITS", 99)
    async with asyncio.timeout(WITHIN):
        with pytest.raises(ChainBroken, match="COMMITS is empty"):
            await chain.append(next_batch(chain))


async def test_a_record_whose_acknowledgement_was_lost_counts_though_a_successor_has_taken_the_chain(bus: Bus) -> None:
    first = await bus.chain()
    await first.take("first")
    batch = next_batch(first)
    ack = await bus.js.publish(bus.subjects.commits, encode(batch))
    second = await bus.chain()
    await second.take("second")
    assert (await first.append(batch)).seq == ack.seq, "it stands, so it was not refused"
    with pytest.raises(StaleWriter, match="second"):
        await first.append(next_batch(first))


# --- other servers ---------------------------------------------------------------------------------------------------


class OtherNats(EmbeddedNats):
    """A nats-server with another JetStream block than ours."""

    jetstream = ""

    def _command(self) -> list[str]:
        command = super()._command()
        config = self.directory / "nats.conf"
        config.write_text(re.sub(r"jetstream \{.*\}\n", self.jetstream, config.read_text()))
        return command


@pytest.mark.parametrize(
    ("jetstream", "message"),
    [
        ("", "its JetStream does not"),
        ('jetstream {{ store_dir: "{}", max_file_store: 20MB }}\n', "no room for the streams"),
    ],
    ids=["without JetStream", "too small"],
)
async def test_a_server_that_cannot_hold_a_run_is_told_at_the_start(
    tmp_path: Path, jetstream: str, message: str
) -> None:
    server = OtherNats(tmp_path / "nats")
    server.jetstream = jetstream.format(tmp_path / "js")
    server.start()
    try:
        bus = await Bus.connect(server.url, "r", name="test")
        async with asyncio.timeout(40):
            with pytest.raises(BusUnavailable, match=message) as refused:
                await bus.create_streams()
        assert "→" in str(refused.value) and refused.value.exit_code == 2
        await bus.close()
    finally:
        server.stop()


async def test_a_stream_that_forgets_by_age_is_refused(bus: Bus) -> None:
    name = bus.subjects.stream("ROLLOUTS")
    config = (await bus.js.stream_info(name)).config
    await bus.js.update_stream(config.evolve(max_age=3600.0))
    with pytest.raises(StreamMismatch, match=r"max_age: found 3600"):
        await bus.create_streams()


async def test_credentials_in_a_url_are_not_shown() -> None:
    with pytest.raises(BusUnavailable) as refused:
        await Bus.connect(
            "nats://user:hunter2@127.0.0.1:1,nats://s3cret@127.0.0.1:2", "r", name="t", connect_timeout=0.5
        )
    text = str(refused.value)
    assert "hunter2" not in text and "s3cret" not in text and "nats://127.0.0.1:1" in text
