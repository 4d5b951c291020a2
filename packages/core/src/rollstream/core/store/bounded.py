"""The deadline of every call to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

ANSWER_SECONDS = 5.0
T = TypeVar("T")


async def bounded(call: Awaitable[T]) -> T:
    """The call's result, or ``TimeoutError`` (an ``OSError``) after 5 s.

    Not redis-py's ``socket_timeout``: with it every command is sent under ``asyncio.wait_for``, which before
    Python 3.12 loses a cancellation that arrives as the command completes, and the cancelled task goes on for ever.
    """
    async with asyncio.timeout(ANSWER_SECONDS):
        return await call
