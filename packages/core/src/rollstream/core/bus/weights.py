"""Weight notices: the acknowledgement of a batch, and what replicas follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nats.js.errors import NotFoundError

from rollstream.core.bus import retry
from rollstream.core.bus.errors import DigestMismatch
from rollstream.core.bus.reader import Reader
from rollstream.core.wire import WeightNotice, decode_as

if TYPE_CHECKING:
    from rollstream.core.bus.connection import Bus


class WeightLog:
    """WEIGHTS of one run. Invariant: a version of a timeline is announced once, with one digest, for ever."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def announce(self, notice: WeightNotice) -> bool:
        """Announce a version; False when it was announced before with the same digest.

        Raises :class:`DigestMismatch` when it was announced with another digest: this replay has diverged.
        """
        subject = self._bus.subjects.weights(notice.timeline, notice.version)
        result = await self._bus.put_once(subject, notice)
        standing = decode_as(WeightNotice, result.stored.data, where=subject)
        if standing.digest != notice.digest:
            raise DigestMismatch(
                f"v{notice.version} of timeline {notice.timeline} was announced with digest {standing.digest[:16]}, "
                f"this replay made {notice.digest[:16]}",
                hint="replay needs the first run's world size, threads and library versions; else start a new timeline",
            )
        return result.created

    async def get(self, timeline: int, version: int) -> WeightNotice | None:
        """The notice of one version."""
        found = await self._bus.get(self._bus.subjects.weights(timeline, version))
        return None if found is None else decode_as(WeightNotice, found.data, where=found.subject)

    async def newest(self, timeline: int) -> WeightNotice | None:
        """The notice of the newest version of ``timeline``, or None."""
        stream = self._bus.subjects.stream("WEIGHTS")
        subject = self._bus.subjects.weights_of(timeline)

        async def look() -> WeightNotice | None:
            try:
                message = await self._bus.js.get_msg(stream, subject=subject)
            except NotFoundError as error:
                if retry.stream_missing(error):
                    raise retry.missing(stream) from error
                return None
            return decode_as(WeightNotice, message.data or b"", where=message.subject or subject)

        return await retry.through_outages(look, on_wait=self._bus.on_wait)

    def follow(self, timeline: int | None = None, *, from_seq: int = 1) -> Reader:
        """Notices in order; of every timeline when none is named."""
        subject = None if timeline is None else self._bus.subjects.weights_of(timeline)
        return self._bus.read("WEIGHTS", from_seq=from_seq, subject=subject)
