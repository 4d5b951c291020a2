"""Who waits for what since when: one entry a component instance, by the server's clock."""

from __future__ import annotations

import msgspec
from redis.asyncio import Redis

from rollstream.core.store.bounded import bounded
from rollstream.core.store.keys import Keys

PROGRESS_SECONDS = 60.0
"""How long an entry stands that nobody renews. Instances write with every heartbeat, seconds apart."""


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one instance is doing. ``waiting`` is the reason of a wait, empty while it works; times are Unix seconds."""

    component: str
    id: str
    waiting: str = ""
    detail: str = ""
    deadline: float | None = None
    since: float = 0.0


# KEYS: progress. ARGV: field, entry, reason, ttl in s. A value is since|written|reason|entry; `since` stays while the
# reason does.
_SET = """
local t = redis.call('TIME')
local now = string.format('%.3f', t[1] + t[2] / 1000000)
local since = now
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  local began, reason = string.match(old, '^([^|]*)|[^|]*|([^|]*)|')
  if reason == ARGV[3] then since = began end
end
redis.call('HSET', KEYS[1], ARGV[1], since .. '|' .. now .. '|' .. ARGV[3] .. '|' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[4] * 1000))
return 1
"""

# KEYS: progress. ARGV: ttl in s. Returns the values of those who have written within it; the others are taken away.
_LIST = """
local t = redis.call('TIME')
local oldest = t[1] + t[2] / 1000000 - ARGV[1]
local out = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if tonumber(string.match(all[i + 1], '^[^|]*|([^|]*)|')) < oldest then
    redis.call('HDEL', KEYS[1], all[i])
  else
    out[#out + 1] = all[i + 1]
  end
end
return out
"""


class ProgressLeases:
    """The latest entry of each instance. It ends by itself ``ttl`` seconds after it was last written."""

    def __init__(self, redis: Redis, keys: Keys, ttl: float = PROGRESS_SECONDS) -> None:
        self._key = keys.progress
        self._ttl = ttl
        self._set = redis.register_script(_SET)
        self._list = redis.register_script(_LIST)

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
        field = f"{entry.component}:{entry.id}"
        arguments: tuple[str | bytes | float, ...] = (field, msgspec.json.encode(entry), reason, self._ttl)
        await bounded(self._set([self._key], arguments))

    async def list(self) -> list[Progress]:
        """All entries, by component and id."""
        entries = []
        for value in await bounded(self._list([self._key], [self._ttl])):
            since, _, _, entry = value.split(b"|", 3)
            progress = msgspec.json.decode(entry, type=Progress)
            entries.append(msgspec.structs.replace(progress, since=float(since)))
        return sorted(entries, key=lambda entry: (entry.component, entry.id))
