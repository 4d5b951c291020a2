"""Waiting for a condition, with a deadline."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


async def until(condition: Callable[[], object | Awaitable[object]], timeout: float = 10.0) -> None:
    """Returns once ``condition`` (sync or async) is true; TimeoutError after ``timeout`` seconds."""
    async with asyncio.timeout(timeout):
        while True:
            result = condition()
            if inspect.isawaitable(result):
                result = await result
            if result:
                return
            await asyncio.sleep(0.01)
