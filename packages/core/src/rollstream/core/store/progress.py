"""Who waits for what since when: one entry a component instance, by the server's clock."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from rollstream.core.store.bounded import bounded
from rollstream.core.store.keys import Keys


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance is doing. ``waiting`` is the reason of a wait, empty while it works; times are Unix seconds."""

    component: str
    id: str
    waiting: str = ""
    detail: str = ""
    deadline: float | None = None
    since: float = 0.0


# KEYS: progress. ARGV: field, entry, reason. Keeps `since` while the reason stays the same.
_SET = """
local t = redis.call('TIME')
local now = string.format('%.3f', t[1] + t[2] / 1000000)
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  local since, reason = string.match(old, '^([^|]*)|([^|]*)|')
  if reason == ARGV[3] then now = since end
end
redis.call('HSET', KEYS[1], ARGV[1], now .. '|' .. ARGV[3] .. '|' .. ARGV[2])
redis.call('EXPIRE', KEYS[1], 86400)
return 1
"""


class ProgressLeases:
    """The latest entry of each instance stands until it writes the next one."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._key = keys.progress
        self._set = redis.register_script(_SET)

    async def waiting(
        self, component: str, id: str, reason: str, deadline: float | None = None, detail: str = ""
    ) -> None:
        """The instance waits for ``reason``, until ``deadline`` (Unix time) when it has one."""
        await self._write(Progress(component=component, id=id, waiting=reason, detail=detail, deadline=deadline))

    async def working(self, component: str, id: str, detail: str = "") -> None:
        """The instance is not waiting."""
        await self._write(Progress(component=component, id=id, detail=detail))

    async def _write(self, entry: Progress) -> None:
        reason = entry.waiting.replace("|", "/")
        await bounded(self._set([self._key], [f"{entry.component}:{entry.id}", msgspec.json.encode(entry), reason]))

    async def list(self) -> list[Progress]:
        """All entries, by component and id."""
        entries = []
        for value in (await bounded(self._redis.hgetall(self._key))).values():
            since, _, entry = _bytes(value).split(b"|", 2)
            progress = msgspec.json.decode(entry, type=Progress)
            entries.append(msgspec.structs.replace(progress, since=float(since)))
        return sorted(entries, key=lambda entry: (entry.component, entry.id))


def _bytes(value: bytes | str) -> bytes:
    return value if isinstance(value, bytes) else value.encode()
