"""The one thread that touches torch, so that the event loop answers the bus while a step computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from rollstream.trainer import determinism

P = ParamSpec("P")
T = TypeVar("T")


class Compute:
    """Runs calls one after another in a single thread that was prepared once.

    One thread, because OpenMP keeps its thread count per thread and collectives must not interleave.
    """

    def __init__(self, *, deterministic: bool, threads: int | None, seed: int) -> None:
        self._pool = ThreadPoolExecutor(
            1,
            thread_name_prefix="compute",
            initializer=lambda: determinism.prepare(deterministic=deterministic, threads=threads, seed=seed),
        )

    async def __call__(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``function`` in the compute thread and return its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, lambda: function(*args, **kwargs))
