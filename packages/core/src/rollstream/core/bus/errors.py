"""What can go wrong on the bus."""

from __future__ import annotations

from rollstream.core.errors import EXIT_STALE, RollstreamError, UsageError


class BusUnavailable(UsageError):
    """NATS did not answer by the deadline."""


class StreamMismatch(UsageError):
    """A stream or consumer exists with settings other than the declared ones."""


class BusClosed(RollstreamError):
    """NATS has closed this connection for good (it refuses the client); only a new process connects again."""


class StreamMissing(RollstreamError):
    """The server is there, a stream of the run is not."""


class RecordsLost(RollstreamError):
    """A stream ends before records that this process has read: it was made anew, or its server lost data."""


class StaleWriter(RollstreamError):
    """Another orchestrator has taken the commit chain; this one must stop."""

    exit_code = EXIT_STALE


class ChainBroken(RollstreamError):
    """The commit chain contradicts itself at the named place."""


class ChainRewound(RollstreamError):
    """The steps that a reader stands on were made void by a rewind: it must start again from before it."""


class DigestMismatch(RollstreamError):
    """A version was announced before with other weights: the replay diverged."""


class RecordTooLarge(RollstreamError, ValueError):
    """A record does not fit one message, with all of its arrays spilled."""


class BlobMissing(RollstreamError):
    """A spilled array is not on the bus any more, or its bytes do not fit its name."""
