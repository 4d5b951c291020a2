"""A cancellation that a library swallows must not hang the owner of its task."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from rollstream.core import tasks
from rollstream.core.tasks import TaskOwner


async def test_a_swallowed_cancellation_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "INSIST_SECONDS", 0.05)
    swallowed = 0

    async def deaf() -> None:
        nonlocal swallowed
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        swallowed += 1
        await asyncio.sleep(60)

    async with asyncio.timeout(5), TaskOwner() as owner:
        owner.start(deaf(), "deaf")
        await asyncio.sleep(0)
        owner.cancel()
    assert swallowed == 1


async def test_an_orderly_end_is_given_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "INSIST_SECONDS", 0.4)
    ended = False

    async def orderly() -> None:
        nonlocal ended
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)
            ended = True

    async with asyncio.timeout(5), TaskOwner() as owner:
        owner.start(orderly(), "orderly")
        await asyncio.sleep(0)
        owner.cancel()
    assert ended
