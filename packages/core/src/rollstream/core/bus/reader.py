"""Reading a stream in order from a known sequence."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import nats.errors
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, BadRequestError

from rollstream.core.bus.errors import RecordsLost
from rollstream.core.bus.retry import closed_for_good, missing, server_away, stream_missing

if TYPE_CHECKING:
    from rollstream.core.bus.connection import Bus, Stored

FETCH_SECONDS = 2.0
"""Longest single fetch: one that was pending across a server restart is not answered."""


class Reader:
    """An ordered view of one stream, from ``from_seq`` on, optionally of one subject filter.

    Lifecycle: lazily makes an ephemeral pull consumer, and makes a new one from its own position after any fault, so
    it survives server restarts, purges and its consumer's expiry. ``close`` (or ``async with``) removes the consumer.
    Invariant: messages come in stream order, each once, none left out; ``position`` is the next sequence it accepts.
    The server sends each message once and forgets it. What a broken connection or a cancelled call swallowed shows as
    a gap in the consumer's own numbering, or, when nothing followed it, as deliveries that the server counts and this
    reader has not seen; it is read again. Not for concurrent use.
    """

    def __init__(self, bus: Bus, stream: str, from_seq: int, subject: str | None) -> None:
        self._bus = bus
        self._stream = bus.subjects.stream(stream)
        self._subject = subject
        self.position = max(from_seq, 1)
        self._pull: JetStreamContext.PullSubscription | None = None
        self._delivered = 0

    async def __aenter__(self) -> Reader:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def next(self, timeout: float) -> Stored | None:
        """The next message, or None after ``timeout`` seconds without one."""
        found = await self.batch(1, timeout)
        return found[0] if found else None

    async def batch(self, limit: int, timeout: float) -> list[Stored]:
        """Up to ``limit`` messages: waits up to ``timeout`` seconds for the first, takes what is there with it.

        A server that is away takes a few seconds more. Raises ``StreamMissing``, ``RecordsLost`` and ``BusClosed``.
        """
        ends = time.monotonic() + timeout
        while True:
            messages = await self._fetch(limit, max(0.02, min(FETCH_SECONDS, ends - time.monotonic())))
            found = []
            for message in messages:
                if message.metadata.sequence.consumer != self._delivered + 1:
                    await self._drop()  # the next fetch starts at the position, with a new consumer
                    break
                self._delivered += 1
                found.append(self._accept(message))
            if found or time.monotonic() >= ends:
                return found

    def _accept(self, message: Msg) -> Stored:
        sequence = message.metadata.sequence.stream
        self.position = sequence + 1
        return self._bus.stored(message.subject, sequence, message.data)

    async def _fetch(self, limit: int, seconds: float) -> list[Msg]:
        started = time.monotonic()
        try:
            if self._pull is None:
                self._pull = await self._subscribe()
            with suppress(TimeoutError):  # the client raises its own and the plain one
                if messages := await self._pull.fetch(limit, timeout=seconds):
                    return messages
            # Silence: nothing is new, or the consumer is gone with a restarted server, or the last message got lost.
            if not self._bus.connected or not await self._has_delivered_no_more():
                await self._drop()
        except nats.errors.ConnectionClosedError as error:
            raise closed_for_good() from error
        except (APIError, nats.errors.Error, OSError) as error:
            if stream_missing(error):
                raise missing(self._stream) from error
            passing = isinstance(error, APIError | nats.errors.BadSubscriptionError)
            if not (server_away(error) or (passing and not isinstance(error, BadRequestError))):
                raise
            await self._drop()
        await asyncio.sleep(max(0.0, min(0.2, seconds - (time.monotonic() - started))))
        return []

    async def _has_delivered_no_more(self) -> bool:
        """Whether the consumer lives and has sent nothing that did not arrive here."""
        if self._pull is None:
            return False
        try:
            async with asyncio.timeout(2.0):
                delivered = (await self._pull.consumer_info()).delivered
        except (APIError, nats.errors.Error, TimeoutError, OSError):
            return False
        return delivered is None or delivered.consumer_seq == self._delivered

    async def _subscribe(self) -> JetStreamContext.PullSubscription:
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=self.position,
            ack_policy=AckPolicy.NONE,
            filter_subject=self._subject,
            inactive_threshold=120.0,
            mem_storage=True,
            num_replicas=1,
        )
        js = self._bus.js
        last = (await js.stream_info(self._stream)).state.last_seq
        if last < self.position - 1:  # numbers never go back on a stream that lives
            raise RecordsLost(
                f"stream {self._stream} ends at sequence {last}, this process has read up to {self.position - 1}",
                hint="its server lost records or has another store directory: restore that, or start from a checkpoint",
            )
        self._delivered = 0
        info = await js.add_consumer(self._stream, config)
        return await js.pull_subscribe_bind(consumer=info.name, stream=self._stream)

    async def _drop(self) -> None:
        pull, self._pull = self._pull, None
        if pull is not None:
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    await pull.unsubscribe()

    async def close(self) -> None:
        """Remove the consumer; the server forgets it by itself when this fails."""
        pull = self._pull
        if pull is not None:
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    info = await pull.consumer_info()
                await self._bus.js.delete_consumer(self._stream, info.name)
        await self._drop()
