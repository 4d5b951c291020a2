"""One connection to the bus: records in, records out."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import nats.errors
import structlog
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import Header, StreamState
from nats.js.errors import APIError, NotFoundError

from rollstream.core import failpoints
from rollstream.core.bus import retry, streams
from rollstream.core.bus.blobs import CHUNK, IN_FLIGHT, RECORD_LIMIT, chunks, map_arrays, spill
from rollstream.core.bus.errors import BlobMissing, BusUnavailable
from rollstream.core.bus.reader import Reader
from rollstream.core.bus.streams import StreamSettings
from rollstream.core.bus.subjects import Subjects
from rollstream.core.urls import without_credentials
from rollstream.core.wire import AnyRecord, Array, Event, Record, decode, digest, encode

if TYPE_CHECKING:
    from rollstream.core.bus.chain import ChainReader, CommitChain
    from rollstream.core.bus.commands import Commands
    from rollstream.core.bus.intent import IntentStore
    from rollstream.core.bus.leases import EpisodeQueue
    from rollstream.core.bus.weights import WeightLog

T = TypeVar("T")
RecordT = TypeVar("RecordT", bound=Record)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Stored:
    """A message as it stands on a stream. ``record`` decodes on access; spilled arrays stay spilled."""

    subject: str
    seq: int
    data: bytes

    @property
    def digest(self) -> str:
        """sha256 of the bytes."""
        return digest(self.data)

    @property
    def record(self) -> AnyRecord:
        """The record; raises ``MalformedRecord`` naming subject and sequence."""
        return decode(self.data, where=f"{self.subject} (sequence {self.seq})")


@dataclass(frozen=True)
class PutResult:
    """What stands on the subject after :meth:`Bus.put_once`; ``created`` says whether this call wrote it."""

    stored: Stored
    created: bool


class Bus:
    """The NATS connection of one process to one run.

    Lifecycle: :meth:`connect` → use from any task of the loop → :meth:`close`. It reconnects for ever; writes retry
    until the server acknowledges them, identified by their subject, so a lost acknowledgement never doubles a record.
    Invariants: a record's blobs are on the bus before the record; the first write to a once-subject stands for ever.
    """

    def __init__(self, client: Client, run: str, on_wait: Callable[[str], None] | None = None) -> None:
        self.client = client
        self.js: JetStreamContext = client.jetstream(timeout=retry.REQUEST_TIMEOUT)
        self.run = run
        self.subjects = Subjects(run)
        self._hears_of_waits = on_wait
        self._wait = ("", -math.inf)

    @classmethod
    async def connect(
        cls, url: str, run: str, *, name: str, connect_timeout: float = 30.0, credentials: str | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> Bus:  # fmt: skip
        """Connect within ``connect_timeout`` seconds or raise :class:`BusUnavailable`. ``credentials`` is a token."""

        async def failed(error: Exception) -> None:
            _log.warning("bus error", error=str(error) or type(error).__name__)

        async def closed() -> None:
            # Before the first connection the caller hears of it from BusUnavailable.
            if client.last_error is not None and connected:
                _log.error("NATS closed this connection for good", error=str(client.last_error))

        client = Client()
        connected = False
        try:
            # The client tries for ever by itself (max_reconnect_attempts counts from the first connection on).
            async with asyncio.timeout(connect_timeout):
                await client.connect(
                    url, name=name, token=credentials, error_cb=failed, closed_cb=closed, allow_reconnect=True,
                    max_reconnect_attempts=-1, reconnect_time_wait=1, ping_interval=15, connect_timeout=2,
                    pending_size=64 * 1024 * 1024,
                )  # fmt: skip
        except (TimeoutError, nats.errors.Error, OSError, ValueError) as error:
            with suppress(Exception):
                async with asyncio.timeout(1.0):
                    await client.close()
            reason = str(error) or "no answer"
            raise BusUnavailable(
                f"NATS at {without_credentials(url)} does not answer within {connect_timeout:g} s ({reason})",
                hint="start it, or correct --bus.url; without a URL `rollstream rl` starts one itself",
            ) from error
        connected = True
        if client.max_payload < RECORD_LIMIT:
            await client.close()
            raise BusUnavailable(
                f"NATS at {without_credentials(url)} takes messages of {client.max_payload} bytes, "
                f"records have up to {RECORD_LIMIT}",
                hint="set max_payload: 1MB in the server's configuration",
            )
        return cls(client, run, on_wait)

    def on_wait(self, reason: str) -> None:
        """A request is being retried: ``bus_away`` or ``bus_full``."""
        self._wait = (reason, time.monotonic())
        if self._hears_of_waits is not None:
            self._hears_of_waits(reason)

    @property
    def waits_for(self) -> str:
        """What this connection has been waiting for within the last seconds: ``bus_away``, ``bus_full`` or nothing."""
        reason, when = self._wait
        return reason if time.monotonic() - when < retry.REQUEST_TIMEOUT + 2.0 else ""

    @property
    def connected(self) -> bool:
        """Whether the connection is up right now."""
        return self.client.is_connected

    async def close(self) -> None:
        """Flush and close, within five seconds."""
        try:
            async with asyncio.timeout(5.0):
                await self.client.close()
        except (TimeoutError, nats.errors.Error, OSError):
            _log.warning("bus did not close in time")

    # --- streams ---------------------------------------------------------------------------------------------------

    async def create_streams(self, settings: StreamSettings = StreamSettings()) -> None:  # noqa: B008 - frozen
        """Create the run's streams and intent bucket where missing; raise ``StreamMismatch`` on other settings."""
        try:
            await retry.through_outages(
                lambda: streams.create_streams(self.js, self.subjects, settings), deadline=15.0, on_wait=self.on_wait
            )
        except Exception as error:
            if retry.stream_full(error):
                raise BusUnavailable(
                    f"NATS has no room for the streams of this run ({settings.max_bytes / 2**30:g} GiB each): {error}",
                    hint="raise max_file_store of the server, or delete the streams of runs that are over",
                ) from error
            if retry.server_away(error):
                raise BusUnavailable(
                    f"NATS answers, its JetStream does not ({str(error) or type(error).__name__})",
                    hint="start nats-server with JetStream: -js, or a jetstream block in its configuration",
                ) from error
            raise
        await self.intent.create()

    async def verify_streams(self, settings: StreamSettings = StreamSettings()) -> None:  # noqa: B008 - frozen
        """Raise ``StreamMismatch`` unless every stream stands as declared."""
        await streams.verify_streams(self.js, self.subjects, settings)

    async def delete_streams(self) -> None:
        """Delete everything of this run from the bus."""
        await streams.delete_streams(self.js, self.subjects)

    async def last_sequence(self, stream: str) -> int:
        """Sequence of the newest message ever written to ``stream`` (0 for none)."""
        return (await self._state(stream)).last_seq

    async def first_sequence(self, stream: str) -> int:
        """Sequence of the oldest message still on ``stream``."""
        return (await self._state(stream)).first_seq

    async def holds_nothing(self, stream: str) -> bool:
        """Whether no message is left on ``stream``."""
        return (await self._state(stream)).messages == 0

    async def _state(self, stream: str) -> StreamState:
        name = self.subjects.stream(stream)
        return (await self._ask(name, lambda: self.js.stream_info(name))).state

    async def purge_below(self, stream: str, seq: int) -> None:
        """Remove every message of ``stream`` with a sequence below ``seq``."""
        if seq <= await self.first_sequence(stream):
            return
        name = self.subjects.stream(stream)
        await self._ask(name, lambda: self.js.purge_stream(name, seq=seq))

    async def purge_subject(self, stream: str, subject: str) -> None:
        """Remove every message of ``stream`` under ``subject`` (wildcards allowed)."""
        name = self.subjects.stream(stream)
        await self._ask(name, lambda: self.js.purge_stream(name, subject=subject))

    async def _ask(self, stream: str, action: Callable[[], Awaitable[T]], *, deadline: float | None = None) -> T:
        """``action`` on ``stream`` through outages; raises ``StreamMissing`` instead of waiting for what is gone."""
        try:
            return await retry.through_outages(
                action, deadline=deadline, on_wait=self.on_wait, still_hopeful=lambda: self.require(stream)
            )
        except NotFoundError as error:
            if not retry.stream_missing(error):
                raise
            raise retry.missing(stream) from error

    async def require(self, stream: str) -> None:
        """Raise ``StreamMissing`` when the server is there and says that ``stream`` is not."""
        try:
            await self.js.stream_info(stream)
        except NotFoundError as error:
            raise retry.missing(stream) from error
        except nats.errors.ConnectionClosedError as error:
            raise retry.closed_for_good() from error
        except (nats.errors.Error, TimeoutError, OSError):
            return

    # --- records ---------------------------------------------------------------------------------------------------

    def stored(self, subject: str, seq: int, data: bytes) -> Stored:
        """A message in this module's terms."""
        return Stored(subject, seq, data)

    async def put_once(self, subject: str, record: Record, *, deadline: float | None = None) -> PutResult:
        """Write ``record`` unless ``subject`` already holds one; the result tells which record stands.

        Retries through outages and full streams, for ever unless ``deadline`` (seconds) is given.
        """
        data = await self.prepare(record)
        stream = self._stream_of(subject)

        async def attempt() -> PutResult:
            try:
                ack = await self.js.publish(subject, data, stream=stream)
                if not ack.duplicate:
                    return PutResult(Stored(subject, ack.seq, data), created=True)
            except APIError as error:
                if not retry.subject_taken(error):
                    raise
            standing = await self._last(stream, subject)
            if standing is None:  # purged between the refusal and the look
                raise TimeoutError(f"{subject} changed while it was written")
            # Equal bytes are this very write whose acknowledgement was lost: it counts as created.
            return PutResult(standing, created=standing.data == data)

        return await self._ask(stream, attempt, deadline=deadline)

    async def append(self, subject: str, data: bytes, *, after: int, beaten: Callable[[], Awaitable[int]]) -> int:
        """Append to ``subject`` whose last sequence must be ``after``; the sequence of the message.

        ``beaten`` is asked for it when another message stands there already: perhaps it is this very one.
        """
        stream = self._stream_of(subject)
        headers = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: str(after)}

        async def attempt() -> int:
            try:
                return (await self.js.publish(subject, data, stream=stream, headers=headers)).seq
            except APIError as error:
                if not retry.wrong_last_sequence(error):
                    raise
            return await beaten()

        return await self._ask(stream, attempt)

    async def prepare(self, record: Record) -> bytes:
        """Bytes of ``record`` with its large arrays spilled; its blobs are on the bus when this returns."""
        _, data, blobs = spill(record)
        if blobs:
            await self._write_blobs(blobs)
            failpoints.hit("after_blobs")
        return data

    async def get(self, subject: str) -> Stored | None:
        """What stands on ``subject``, or None."""
        stream = self._stream_of(subject)
        return await self._ask(stream, lambda: self._last(stream, subject))

    async def _last(self, stream: str, subject: str) -> Stored | None:
        try:
            # A run's streams have one replica: a write that was acknowledged is always seen.
            message = await self.js.get_msg(stream, subject=subject, direct=True)
        except NotFoundError as error:
            if retry.stream_missing(error):
                raise retry.missing(stream) from error
            return None
        return Stored(subject, message.seq or 0, message.data or b"")

    def read(self, stream: str, *, from_seq: int = 1, subject: str | None = None) -> Reader:
        """An ordered reader of ``stream``."""
        return Reader(self, stream, from_seq, subject)

    def _stream_of(self, subject: str) -> str:
        family = subject[len(self.subjects.prefix) + 1 :].split(".", 1)[0]
        return self.subjects.stream(family.upper())

    # --- blobs -----------------------------------------------------------------------------------------------------

    async def put_blob(self, data: bytes) -> str:
        """Write ``data`` under its sha256 and return that."""
        name = digest(data)
        await self._write_blobs({name: data})
        return name

    async def _write_blobs(self, blobs: dict[str, bytes]) -> None:
        stream = self.subjects.stream("BLOBS")
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def write(subject: str, piece: bytes) -> None:
            async def attempt() -> None:
                try:
                    await self.js.publish(subject, piece, stream=stream)
                except APIError as error:
                    if not retry.subject_taken(error):  # taken: the same content is there already
                        raise

            async with gate:
                await self._ask(stream, attempt)

        await asyncio.gather(
            *(
                write(self.subjects.blob(name, index), piece)
                for name, data in blobs.items()
                for index, piece in enumerate(chunks(data))
            )
        )

    async def get_blob(self, sha256: str, size: int) -> bytes:
        """The ``size`` bytes of blob ``sha256``; raises :class:`BlobMissing`."""
        parts: list[bytes] = []
        for index in range(max(1, -(-size // CHUNK))):
            found = await self.get(self.subjects.blob(sha256, index))
            if found is None:
                raise BlobMissing(f"piece {index} of blob {sha256} is not on the bus")
            parts.append(found.data)
        data = b"".join(parts)
        if digest(data) != sha256:
            raise BlobMissing(f"blob {sha256} holds other bytes than its name says")
        return data

    async def resolve(self, record: RecordT) -> RecordT:
        """``record`` with every spilled array filled in (it keeps its ``blob`` name beside the data)."""
        wanted: dict[str, Array] = {}

        def note(array: Array) -> Array:
            if array.blob is not None and not array.data:
                wanted[array.blob] = array
            return array

        map_arrays(record, note)
        if not wanted:
            return record
        gate = asyncio.Semaphore(IN_FLIGHT)

        async def fetch(name: str, size: int) -> tuple[str, bytes]:
            async with gate:
                return name, await self.get_blob(name, size)

        held = dict(await asyncio.gather(*(fetch(name, array.nbytes) for name, array in wanted.items())))

        def fill(array: Array) -> Array:
            if array.blob is None or array.data:
                return array
            return Array(dtype=array.dtype, shape=array.shape, data=held[array.blob])

        resolved: Any = map_arrays(record, fill)
        return resolved  # type: ignore[no-any-return]

    # --- the rest of the bus, by room ------------------------------------------------------------------------------

    async def publish_event(self, event: Event) -> None:
        """Tell operators; best effort, within two seconds, never an error."""
        try:
            await self.js.publish(self.subjects.event(event.kind), encode(event), timeout=2.0)
        except Exception as error:
            _log.warning("event was not published", kind=event.kind, error=str(error) or type(error).__name__)

    async def chain(self) -> CommitChain:
        """The writer's side of COMMITS, at the current head."""
        from rollstream.core.bus.chain import CommitChain

        return await CommitChain.open(self)

    def chain_reader(self, *, after_step: int = 0, timeline: int = 1) -> ChainReader:
        """The trainer's side of COMMITS: batches after ``after_step``."""
        from rollstream.core.bus.chain import ChainReader

        return ChainReader(self, after_step=after_step, timeline=timeline)

    def episodes(self, source: str, *, lease_seconds: float, max_ack_pending: int = 10_000) -> EpisodeQueue:
        """Leased work of ``source``."""
        from rollstream.core.bus.leases import EpisodeQueue

        return EpisodeQueue(self, source, lease_seconds, max_ack_pending)

    @property
    def weights(self) -> WeightLog:
        """Weight notices."""
        from rollstream.core.bus.weights import WeightLog

        return WeightLog(self)

    @property
    def intent(self) -> IntentStore:
        """Phase, pause and scale."""
        from rollstream.core.bus.intent import IntentStore

        return IntentStore(self)

    @property
    def commands(self) -> Commands:
        """Request/reply."""
        from rollstream.core.bus.commands import Commands

        return Commands(self)
