"""The streams of a run: declared once, created or compared at start."""

from __future__ import annotations

from dataclasses import dataclass

from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from rollstream.core.bus.errors import StreamMismatch
from rollstream.core.bus.subjects import Subjects

STREAMS = ("GROUPS", "EPISODES", "ROLLOUTS", "BLOBS", "COMMITS", "WEIGHTS", "EVENTS")

_COMPARED = (
    "subjects", "retention", "max_msgs", "max_bytes", "discard", "discard_new_per_subject", "max_msgs_per_subject",
    "storage", "max_age", "allow_direct",
)  # fmt: skip


@dataclass(frozen=True)
class StreamSettings:
    """Sizes that an operator may choose. A full stream refuses new messages: back-pressure, never loss."""

    max_bytes: int = 8 << 30
    """Bytes of each stream of facts."""

    max_events: int = 10_000
    """Events that are kept; older ones go."""

    storage: StorageType = StorageType.FILE


def stream_configs(subjects: Subjects, settings: StreamSettings) -> list[StreamConfig]:
    """The declared configuration of each stream."""
    configs = []
    for name in STREAMS:
        once = name not in ("COMMITS", "EVENTS")
        events = name == "EVENTS"
        configs.append(
            StreamConfig(
                name=subjects.stream(name),
                subjects=[subjects.everything(name)],
                retention=RetentionPolicy.WORK_QUEUE if name == "EPISODES" else RetentionPolicy.LIMITS,
                max_msgs=settings.max_events if events else -1,
                max_bytes=settings.max_bytes,
                discard=DiscardPolicy.OLD if events else DiscardPolicy.NEW,
                discard_new_per_subject=once,
                max_msgs_per_subject=1 if once else -1,
                storage=settings.storage,
                max_age=0.0,
                allow_direct=True,
                duplicate_window=120,
            )
        )
    return configs


def differences(found: StreamConfig, wanted: StreamConfig) -> list[str]:
    """Fields of ``found`` that differ from ``wanted``, each as ``field: found …, wanted …``."""
    return [
        f"{field}: found {getattr(found, field)!r}, wanted {getattr(wanted, field)!r}"
        for field in _COMPARED
        if getattr(found, field) != getattr(wanted, field)
    ]


async def create_streams(js: JetStreamContext, subjects: Subjects, settings: StreamSettings) -> None:
    """Create what is missing; raise :class:`StreamMismatch` when something stands with other settings."""
    for wanted in stream_configs(subjects, settings):
        try:
            found = (await js.stream_info(wanted.name or "")).config
        except NotFoundError:
            found = (await js.add_stream(wanted)).config
        wrong = differences(found, wanted)
        if wrong:
            raise StreamMismatch(
                f"stream {wanted.name} has other settings than this release declares: {'; '.join(wrong)}",
                hint="use the release that made the run, or start a new run (--clean deletes this one's streams)",
            )


async def verify_streams(js: JetStreamContext, subjects: Subjects, settings: StreamSettings) -> None:
    """Like :func:`create_streams`, but a missing stream is an error too."""
    for wanted in stream_configs(subjects, settings):
        try:
            found = (await js.stream_info(wanted.name or "")).config
        except NotFoundError:
            raise StreamMismatch(
                f"stream {wanted.name} does not exist",
                hint="start the orchestrator of this run first: it creates the streams",
            ) from None
        wrong = differences(found, wanted)
        if wrong:
            raise StreamMismatch(f"stream {wanted.name} has other settings: {'; '.join(wrong)}")


async def delete_streams(js: JetStreamContext, subjects: Subjects) -> None:
    """Delete every stream of the run and its intent bucket."""
    for name in [*map(subjects.stream, STREAMS), f"KV_{subjects.intent_bucket}"]:
        try:
            await js.delete_stream(name)
        except NotFoundError:
            continue
