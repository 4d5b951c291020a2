"""Leased work: EPISODES as a queue with heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
from nats.js.errors import APIError, NotFoundError

from rollstream.core.bus import retry
from rollstream.core.bus.errors import StreamMismatch
from rollstream.core.bus.subjects import token
from rollstream.core.wire import Episode, MalformedRecord, decode_as

if TYPE_CHECKING:
    from rollstream.core.bus.connection import Bus

_log = structlog.get_logger(__name__)


class EpisodeLease:
    """One leased episode. It goes to another worker when nobody beats for ``lease_seconds``.

    Lifecycle: work inside ``async with lease.heartbeat()``, then exactly one of :meth:`ack`, :meth:`term`, :meth:`nak`.
    """

    def __init__(self, message: Msg, episode: Episode, lease_seconds: float) -> None:
        self._message = message
        self._seconds = lease_seconds
        self.episode = episode
        self.deliveries = message.metadata.num_delivered

    @asynccontextmanager
    async def heartbeat(self) -> AsyncIterator[None]:
        """Keep the lease alive while the body runs; the beating task ends with it."""
        task = asyncio.create_task(self._beat(), name=f"lease {self.episode.group}/{self.episode.member}")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait(
                [task]
            )  # awaiting the task itself would take a cancellation of the worker for the task's
            if not task.cancelled():
                task.result()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            try:
                await self._message.in_progress()
            except (nats.errors.Error, OSError) as error:
                # Not fatal: the worst is a second delivery, and the first rollout wins.
                _log.warning("lease heartbeat failed", group=self.episode.group, error=str(error))

    async def ack(self) -> None:
        """The rollout stands: remove the episode. A lost ack only costs a redelivery."""
        with suppress(nats.errors.MsgAlreadyAckdError):
            await retry.through_outages(lambda: self._message.ack(), deadline=5.0)

    async def term(self) -> None:
        """Never deliver again."""
        with suppress(nats.errors.MsgAlreadyAckdError):
            await retry.through_outages(lambda: self._message.term(), deadline=5.0)

    async def nak(self, delay: float = 0.0) -> None:
        """Give it back, to be delivered after ``delay`` seconds."""
        with suppress(nats.errors.MsgAlreadyAckdError):
            await retry.through_outages(lambda: self._message.nak(delay=delay or None), deadline=5.0)


class EpisodeQueue:
    """The work queue of one source; any number of workers share its durable consumer.

    Lifecycle: the first :meth:`pull` creates the consumer, or compares the one that stands with the declared settings
    and raises ``StreamMismatch`` (binding to a durable keeps old settings silently). Survives server restarts.
    """

    def __init__(self, bus: Bus, source: str, lease_seconds: float, max_ack_pending: int) -> None:
        self._bus = bus
        self._source = source
        self._seconds = lease_seconds
        self._stream = bus.subjects.stream("EPISODES")
        self._durable = f"workers-{token(source)}".replace("=", "_")
        self._config = ConsumerConfig(
            durable_name=self._durable, ack_policy=AckPolicy.EXPLICIT, ack_wait=lease_seconds, max_deliver=-1,
            deliver_policy=DeliverPolicy.ALL, filter_subject=bus.subjects.episodes_of(source),
            max_ack_pending=max_ack_pending,
        )  # fmt: skip
        self._pull: JetStreamContext.PullSubscription | None = None

    async def pull(self, limit: int, timeout: float) -> list[EpisodeLease]:
        """Lease up to ``limit`` episodes, waiting up to ``timeout`` (≤ 5) seconds for the first."""
        try:
            if self._pull is None:
                await self._ensure()
                self._pull = await self._bus.js.pull_subscribe_bind(durable=self._durable, stream=self._stream)
            messages = await self._pull.fetch(limit, timeout=min(timeout, 5.0))
        except nats.errors.TimeoutError:
            return []
        except nats.errors.ConnectionClosedError as error:
            raise retry.closed_for_good() from error
        except (APIError, nats.errors.Error, OSError) as error:
            if retry.stream_missing(error):
                raise retry.missing(self._stream) from error
            if not (retry.server_away(error) or isinstance(error, nats.errors.BadSubscriptionError | NotFoundError)):
                raise
            await self.close()
            await asyncio.sleep(min(timeout, 0.5))
            return []
        return [lease for message in messages if (lease := await self._lease(message)) is not None]

    async def _lease(self, message: Msg) -> EpisodeLease | None:
        try:
            episode = decode_as(Episode, message.data, where=message.subject)
        except MalformedRecord as error:
            _log.error("malformed episode is dropped", error=str(error))
            await message.term()
            return None
        return EpisodeLease(message, episode, self._seconds)

    async def _ensure(self) -> None:
        try:
            found = (await self._bus.js.consumer_info(self._stream, self._durable)).config
        except NotFoundError:
            found = (await self._bus.js.add_consumer(self._stream, self._config)).config
        wrong = [
            f"{field}: found {getattr(found, field)!r}, wanted {getattr(self._config, field)!r}"
            for field in ("ack_wait", "max_deliver", "max_ack_pending", "filter_subject", "ack_policy")
            if getattr(found, field) != getattr(self._config, field)
        ]
        if wrong:
            raise StreamMismatch(
                f"consumer {self._durable} has other settings: {'; '.join(wrong)}",
                hint="every env worker of a run needs the same workers.* settings",
            )

    async def pending(self) -> int:
        """Episodes that no worker has leased yet."""
        await self._ensure()
        return (await self._bus.js.consumer_info(self._stream, self._durable)).num_pending or 0

    async def close(self) -> None:
        """Drop this process's subscription; the durable consumer stays."""
        pull, self._pull = self._pull, None
        if pull is not None:
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    await pull.unsubscribe()
