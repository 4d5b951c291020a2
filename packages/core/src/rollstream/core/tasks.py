"""Background tasks with an owner, and the event that says the process should stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")

INSIST_SECONDS = 15.0
"""A task that was cancelled and still runs after this long is cancelled again; longer than any orderly end takes."""


class TaskOwner:
    """Owns background tasks: ``async with TaskOwner() as owner: owner.start(work(), "work")``.

    Lifecycle: enter → ``start`` any number of tasks → the block ends when its body and all tasks have ended.
    Invariants: no task outlives the block; an exception in a task cancels the body and the other tasks and comes out
    of the block in an exception group (``core.errors.first_cause`` finds it). ``cancel`` ends all tasks, for an
    orderly stop.
    """

    def __init__(self) -> None:
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> TaskOwner:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        insisting = asyncio.create_task(self._insist(), name="insist")
        try:
            await self._group.__aexit__(kind, error, trace)
        finally:
            insisting.cancel()

    async def _insist(self) -> None:
        # On Python 3.11 asyncio.wait_for, which libraries use, can swallow a cancellation that meets its result.
        asked: set[asyncio.Task[Any]] = set()
        while True:
            await asyncio.sleep(INSIST_SECONDS)
            for task in asked & self._tasks:
                task.cancel()
            asked = {task for task in self._tasks if task.cancelling()}

    def start(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Runs ``work`` as an owned task."""
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> None:
        """Asks every task to end; the block waits for them."""
        for task in list(self._tasks):
            task.cancel()


def shutdown_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set. To be called once, inside the running loop of the main thread."""
    event = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, event.set)
    return event
