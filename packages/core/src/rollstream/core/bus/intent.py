"""What the run is meant to do: phase, pause, scale. One KV entry, written by compare-and-set."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
from nats.js.api import KeyValueConfig
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError, NotFoundError

from rollstream.core.bus import retry
from rollstream.core.bus.errors import StaleWriter

if TYPE_CHECKING:
    from rollstream.core.bus.connection import Bus


class Phase(StrEnum):
    """Where a run stands. Order: created → starting → running → draining → finalising → done, or failed from any."""

    CREATED = "created"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    FINALISING = "finalising"
    DONE = "done"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self in (Phase.DONE, Phase.FAILED)


class Intent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The run's intent. ``epoch`` is the orchestrator epoch that wrote the phase; an older epoch is refused."""

    phase: Phase = Phase.CREATED
    epoch: int = 0
    paused: bool = False
    scale: dict[str, int] = {}
    config_digest: str = ""
    reason: str = ""
    changed: int = 0


class IntentStore:
    """The intent of one run in its KV bucket (JSON, so that any client can read it)."""

    KEY = "intent"

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def create(self) -> None:
        """Make the bucket if it is missing."""

        async def attempt() -> None:
            try:
                await self._bus.js.key_value(self._bus.subjects.intent_bucket)
            except NotFoundError:
                await self._bus.js.create_key_value(KeyValueConfig(bucket=self._bus.subjects.intent_bucket, history=5))

        await retry.through_outages(attempt, deadline=30.0)

    async def get(self) -> Intent:
        """The present intent; the default when nobody has written one."""
        return (await self._load())[0]

    async def _load(self) -> tuple[Intent, int]:
        async def attempt() -> tuple[Intent, int]:
            try:
                bucket = await self._bus.js.key_value(self._bus.subjects.intent_bucket)
                entry = await bucket.get(self.KEY)
            except (KeyNotFoundError, NotFoundError):
                return Intent(), 0
            return msgspec.json.decode(entry.value or b"{}", type=Intent), entry.revision or 0

        return await retry.through_outages(attempt)

    async def update(self, **changes: object) -> Intent:
        """Change some fields, atomically; retried while others write."""
        for _ in range(100):
            intent, revision = await self._load()
            changed = msgspec.structs.replace(intent, changed=time.time_ns(), **changes)
            if await self._write(changed, revision):
                return changed
        raise TimeoutError("the run's intent could not be written: others kept changing it")

    async def set_phase(self, phase: Phase, *, epoch: int, reason: str = "") -> Intent:
        """Write the phase as orchestrator ``epoch``; raises :class:`StaleWriter` when a later epoch has written."""
        for _ in range(100):
            intent, revision = await self._load()
            if intent.epoch > epoch:
                raise StaleWriter(f"epoch {intent.epoch} leads this run, epoch {epoch} may not change its phase")
            changed = msgspec.structs.replace(intent, phase=phase, epoch=epoch, reason=reason, changed=time.time_ns())
            if await self._write(changed, revision):
                return changed
        raise TimeoutError("the run's phase could not be written: others kept changing it")

    async def _write(self, intent: Intent, revision: int) -> bool:
        async def attempt() -> bool:
            bucket = await self._bus.js.key_value(self._bus.subjects.intent_bucket)
            try:
                await bucket.update(self.KEY, msgspec.json.encode(intent), last=revision or None)
            except KeyWrongLastSequenceError:
                return False
            return True

        return await retry.through_outages(attempt)
