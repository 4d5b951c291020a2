"""Intent, commands, weight notices and events on a real nats-server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rollstream.cli.servers import EmbeddedNats
from rollstream.core.bus import Bus, BusUnavailable, CommandFailed, DigestMismatch, Phase, StaleWriter, StreamMissing
from rollstream.core.wire import Event, WeightNotice
from support.rollouts import make_group


def notice(version: int, *, digest: str = "a" * 64, timeline: int = 1) -> WeightNotice:
    return WeightNotice(
        timeline=timeline, version=version, transport="filesystem", location=f"weights/{timeline}/v{version}",
        nbytes=1, digest=digest, created=time.time_ns(),
    )  # fmt: skip


# --- intent ----------------------------------------------------------------------------------------------------------


async def test_only_the_leading_epoch_writes_the_phase(bus: Bus) -> None:
    assert (await bus.intent.get()).phase is Phase.CREATED
    await bus.intent.set_phase(Phase.RUNNING, epoch=1)
    await bus.intent.set_phase(Phase.STARTING, epoch=2)
    with pytest.raises(StaleWriter, match="epoch 2 leads this run"):
        await bus.intent.set_phase(Phase.DONE, epoch=1)
    intent = await bus.intent.get()
    assert (intent.phase, intent.epoch) == (Phase.STARTING, 2)


async def test_writers_of_the_intent_lose_none_of_each_others_changes(bus: Bus) -> None:
    async def scale(name: str) -> None:
        # Each changes another field: a lost update would bring an old value back.
        await bus.intent.update(**{name: {"config_digest": "d", "reason": "r", "paused": True}[name]})

    await asyncio.gather(bus.intent.set_phase(Phase.RUNNING, epoch=1), *map(scale, ("config_digest", "paused")))
    intent = await bus.intent.get()
    assert (intent.phase, intent.config_digest, intent.paused) == (Phase.RUNNING, "d", True)


# --- commands --------------------------------------------------------------------------------------------------------


async def test_commands_are_answered_refused_or_reported_as_unheard(bus: Bus) -> None:
    async def echo(payload: dict[str, Any]) -> dict[str, Any]:
        return {"heard": payload}

    async def refuse(_: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("not now")

    await bus.commands.serve("trainer", {"echo": echo, "refuse": refuse})
    await bus.client.flush()
    assert await bus.commands.request("trainer", "echo", {"n": 1}) == {"heard": {"n": 1}}
    with pytest.raises(CommandFailed, match="trainer refused 'refuse': not now"):
        await bus.commands.request("trainer", "refuse", {})
    assert await bus.commands.request("trainer", "echo", {}) == {"heard": {}}, "a failed command ends nothing"
    with pytest.raises(CommandFailed, match="router did not answer"):
        await bus.commands.request("router", "echo", {}, timeout=0.5)


async def test_commands_are_served_again_after_a_server_crash(bus: Bus, nats_server: EmbeddedNats) -> None:
    async def pong(_: dict[str, Any]) -> dict[str, Any]:
        return {"ok": True}

    await bus.commands.serve("trainer", {"ping": pong})
    nats_server.kill()
    nats_server.start()
    async with asyncio.timeout(20):
        while True:
            try:
                assert await bus.commands.request("trainer", "ping", {}, timeout=1.0) == {"ok": True}
                break
            except CommandFailed:
                continue


# --- weight notices --------------------------------------------------------------------------------------------------


async def test_a_version_is_announced_once_with_one_digest(bus: Bus) -> None:
    first = notice(1)
    assert await bus.weights.announce(first)
    assert not await bus.weights.announce(notice(1)), "the time differs, the weights do not"
    with pytest.raises(DigestMismatch, match="v1 of timeline 1"):
        await bus.weights.announce(notice(1, digest="b" * 64))
    assert await bus.weights.get(1, 1) == first
    assert await bus.last_sequence("WEIGHTS") == 1


async def test_timelines_do_not_mix_and_newest_survives_a_prune(bus: Bus) -> None:
    for version in range(12):  # v11 is newer than v9, whatever their names sort like
        await bus.weights.announce(notice(version))
    await bus.weights.announce(notice(3, timeline=2))
    newest, other = await bus.weights.newest(1), await bus.weights.newest(2)
    assert newest is not None and newest.version == 11
    assert other is not None and other.version == 3
    assert await bus.weights.newest(3) is None
    await bus.purge_below("WEIGHTS", 9)
    async with bus.weights.follow(1) as reader:
        found = [stored.subject.rsplit(".", 1)[1] for stored in await reader.batch(50, 5.0)]
    assert found == ["8", "9", "10", "11"]


async def test_newest_on_a_deleted_stream_is_an_error_not_none(bus: Bus) -> None:
    await bus.delete_streams()
    async with asyncio.timeout(15):
        with pytest.raises(StreamMissing):
            await bus.weights.newest(1)


# --- events and servers ----------------------------------------------------------------------------------------------


async def test_an_event_during_an_outage_costs_seconds_and_no_error(bus: Bus, nats_server: EmbeddedNats) -> None:
    event = Event(kind="test", component="c", message="m", created=1)
    await bus.publish_event(event)
    assert await bus.last_sequence("EVENTS") == 1
    nats_server.kill()
    started = time.monotonic()
    await bus.publish_event(event)
    assert time.monotonic() - started < 4.0
    nats_server.start()


class SmallNats(EmbeddedNats):
    """A server that takes smaller messages than our records may be."""

    def _command(self) -> list[str]:
        command = super()._command()
        config = self.directory / "nats.conf"
        config.write_text(config.read_text().replace("max_payload: 1MB", "max_payload: 64KB"))
        return command


async def test_a_server_with_a_small_max_payload_is_refused(tmp_path: Any) -> None:
    server = SmallNats(tmp_path / "nats")
    server.start()
    try:
        with pytest.raises(BusUnavailable, match="max_payload") as refused:
            bus = await Bus.connect(server.url, "r", name="test")
            await bus.create_streams()
        assert "→" in str(refused.value)
    finally:
        server.stop()


# --- heartbeats ------------------------------------------------------------------------------------------------------


async def test_cancelling_a_worker_while_its_heartbeat_ends_is_not_swallowed(bus: Bus) -> None:
    from rollstream.core.wire import Episode, Sampling

    episode = Episode(group="g", member=0, kind="train", source="s", task=0, sampling=Sampling(), timeline=1)
    await bus.put_once(bus.subjects.episode("s", "g", 0), episode)
    [lease] = await bus.episodes("s", lease_seconds=30.0).pull(1, 5.0)
    reached = False

    async def work() -> None:
        nonlocal reached
        async with lease.heartbeat():
            await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(task.cancel)  # meets the end of the block
        reached = True
        await asyncio.sleep(5)

    task = asyncio.create_task(work())
    done, _ = await asyncio.wait([task], timeout=2.0)
    assert done, "the cancellation was swallowed"
    assert task.cancelled() and not reached
    await bus.put_once(bus.subjects.group("after"), make_group(0))
