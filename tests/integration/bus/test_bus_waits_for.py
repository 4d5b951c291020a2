"""A connection can say what it waits for: the reason that status shows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rollstream.core.bus import Bus
from rollstream.core.wire import WeightNotice


async def test_an_outage_is_the_reason_until_it_is_over(nats_server: Any, bus: Bus) -> None:
    notice = WeightNotice(
        timeline=1, version=0, transport="filesystem", location="weights/1/v0", nbytes=1, digest="ab" * 32, created=1
    )
    assert bus.waits_for == ""
    await asyncio.to_thread(nats_server.kill)
    writing = asyncio.create_task(bus.weights.announce(notice))
    await until(lambda: bus.waits_for == "bus_away")
    await asyncio.to_thread(nats_server.start)
    async with asyncio.timeout(30):
        assert await writing
    await until(lambda: bus.waits_for == "")


async def until(ready: Callable[[], bool]) -> None:
    async with asyncio.timeout(15):
        while not ready():  # noqa: ASYNC110 - looked at from outside
            await asyncio.sleep(0.05)
