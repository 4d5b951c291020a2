"""Retrying through outages: what counts as the server being away, and how long to wait between tries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import nats.errors
from nats.js.errors import APIError, NoStreamResponseError, NotFoundError, ServiceUnavailableError

from rollstream.core.bus.errors import BusClosed, StreamMissing

T = TypeVar("T")

REQUEST_TIMEOUT = 5.0
"""Seconds that one request may take; nothing waits longer in one piece (a request over a restart is never answered)."""

_AWAY = (
    asyncio.TimeoutError,
    nats.errors.TimeoutError,
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


def stream_missing(error: BaseException) -> bool:
    """Whether the server says that the stream does not exist (10059)."""
    return isinstance(error, NotFoundError) and error.err_code == 10059


def closed_for_good() -> BusClosed:
    """The error for a connection that will not come back."""
    return BusClosed(
        "the connection to NATS is closed for good",
        hint="a restart connects again; this log and the server's say why the server refused this client",
    )


def missing(stream: str) -> StreamMissing:
    """The error for a stream that is not there."""
    return StreamMissing(
        f"stream {stream} is not on the NATS server any more",
        hint="was the run deleted (--clean), or does the server have another store directory? start the run again",
    )


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
    still_hopeful: Callable[[], Awaitable[None]] | None = None,
) -> T:
    """Run ``action`` until the server answers; other errors pass. ``deadline`` in seconds, None waits for ever.

    ``on_wait`` hears why it waits: ``bus_away`` or ``bus_full``. ``still_hopeful`` is called when nobody answers and
    raises when nobody ever will. Raises :class:`BusClosed` when the client itself has given up.
    """
    ends = None if deadline is None else time.monotonic() + deadline
    pause = 0.05
    while True:
        try:
            return await action()
        except nats.errors.ConnectionClosedError as error:
            raise closed_for_good() from error
        except Exception as error:
            reason = "bus_full" if stream_full(error) else "bus_away" if server_away(error) else None
            if reason is None or (ends is not None and time.monotonic() >= ends):
                raise
            if on_wait is not None:
                on_wait(reason)
            unanswered = isinstance(error, NoStreamResponseError | nats.errors.NoRespondersError)
        if unanswered and still_hopeful is not None:
            await still_hopeful()
        await asyncio.sleep(pause)
        pause = min(pause * 2, 1.0)
