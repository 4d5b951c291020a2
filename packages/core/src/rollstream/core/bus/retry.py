"""Retrying through outages: what counts as the server being away, and how long to wait between tries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, ServiceUnavailableError

T = TypeVar("T")

REQUEST_TIMEOUT = 5.0
"""Seconds that one request may take; nothing waits longer in one piece (a request over a restart is never answered)."""

_AWAY = (
    asyncio.TimeoutError,
    nats.errors.TimeoutError,
    nats.errors.ConnectionClosedError,
    nats.errors.ConnectionReconnectingError,
    nats.errors.NoRespondersError,
    nats.errors.NoServersError,
    nats.errors.OutboundBufferLimitError,
    nats.errors.StaleConnectionError,
    NoStreamResponseError,
    ServiceUnavailableError,
    OSError,
)

_FULL = (10047, 10077, 10122, 10023)
"""JetStream codes of "no room": insufficient storage, maximum bytes, resources exceeded, insufficient resources."""


def server_away(error: BaseException) -> bool:
    """Whether ``error`` means that the server is unreachable for now, rather than that it refused."""
    return isinstance(error, _AWAY)


def stream_full(error: BaseException) -> bool:
    """Whether the stream refused a message because ``max_bytes`` or the disk is exhausted."""
    return isinstance(error, APIError) and error.err_code in _FULL and "per subject" not in (error.description or "")


def subject_taken(error: BaseException) -> bool:
    """Whether the stream refused a message because its subject already holds one."""
    return isinstance(error, APIError) and "per subject" in (error.description or "")


def wrong_last_sequence(error: BaseException) -> bool:
    """Whether an expected-sequence append met another head (10071)."""
    return isinstance(error, APIError) and error.err_code in (10071, 10164)


async def through_outages(
    action: Callable[[], Awaitable[T]],
    *,
    deadline: float | None = None,
    on_wait: Callable[[str], None] | None = None,
) -> T:
    """Run ``action`` until the server answers; other errors pass. ``deadline`` in seconds, None waits for ever.

    ``on_wait`` hears why it waits: ``bus_away`` or ``bus_full``.
    """
    ends = None if deadline is None else time.monotonic() + deadline
    pause = 0.05
    while True:
        try:
            return await action()
        except Exception as error:
            reason = "bus_full" if stream_full(error) else "bus_away" if server_away(error) else None
            if reason is None or (ends is not None and time.monotonic() >= ends):
                raise
            if on_wait is not None:
                on_wait(reason)
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)
