"""Sticky sessions and load, shared by all routers: one Lua script chooses, binds and counts in one round trip."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from redis.asyncio import Redis

from rollstream.core.store.bounded import bounded
from rollstream.core.store.keys import OUTLIVE, Keys

# Shared head of the scripts: server time, and the removal of what has expired. A session is a member of SESSIONS (its
# expiry), a field of HOMES (its replica) and one of COUNTS (sessions per replica); all three are deleted by Redis when
# empty. A router's open requests are the hash <LOADS><router>; ROUTERS (score: expiry) says which of them count.
_HEAD = (
    OUTLIVE
    + """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local SESSIONS, HOMES, COUNTS, ROUTERS, READY, LOADS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local function forget(session)
  local home = redis.call('HGET', HOMES, session)
  if home then
    redis.call('HDEL', HOMES, session)
    if redis.call('HINCRBY', COUNTS, home, -1) <= 0 then redis.call('HDEL', COUNTS, home) end
  end
  redis.call('ZREM', SESSIONS, session)
end
local function prune(limit)
  for _, session in ipairs(redis.call('ZRANGEBYSCORE', SESSIONS, '-inf', now, 'LIMIT', 0, limit)) do forget(session) end
  for _, router in ipairs(redis.call('ZRANGEBYSCORE', ROUTERS, '-inf', now)) do
    redis.call('DEL', LOADS .. router)
    redis.call('ZREM', ROUTERS, router)
  end
end
"""
)

# ARGV: session ('' for none), router, session ttl ms, load ttl ms, preferred replica ('' for none), number of changes,
# replica, change, replica, change, …, excluded replicas…
_CHOOSE = (
    _HEAD
    + """
prune(32)
local session, router = ARGV[1], ARGV[2]
local mine, first = LOADS .. router, 7 + 2 * ARGV[6]
local function keep_load()  -- also when no replica is left: load that nothing expires would stand for ever
  redis.call('PEXPIRE', mine, ARGV[4])
  redis.call('ZADD', ROUTERS, now + ARGV[4], router)
  outlive(ROUTERS, ARGV[4])
end
for i = 7, first - 1, 2 do
  if redis.call('HINCRBY', mine, ARGV[i], ARGV[i + 1]) <= 0 then redis.call('HDEL', mine, ARGV[i]) end
end
if first > 7 then keep_load() end
local excluded = {}
for i = first, #ARGV do excluded[ARGV[i]] = true end
local candidates, is = {}, {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', READY, '(' .. now, '+inf')) do
  if not excluded[id] then
    candidates[#candidates + 1] = id
    is[id] = true
  end
end
if #candidates == 0 then return false end
local home = false
if session ~= '' then
  local expires = redis.call('ZSCORE', SESSIONS, session)
  if expires and tonumber(expires) <= now then forget(session) else home = redis.call('HGET', HOMES, session) end
end
local chosen = false
if home and is[home] then
  chosen = home
elseif is[ARGV[5]] and not home then
  chosen = ARGV[5]
else
  local load = {}
  for _, other in ipairs(redis.call('ZRANGE', ROUTERS, 0, -1)) do
    for i, open in ipairs(redis.call('HMGET', LOADS .. other, unpack(candidates))) do
      load[i] = (load[i] or 0) + (tonumber(open) or 0)
    end
  end
  local counts = redis.call('HMGET', COUNTS, unpack(candidates))
  local best, least, fewest
  for i, id in ipairs(candidates) do
    local open, count = load[i] or 0, tonumber(counts[i]) or 0
    local better = not best or open < least or (open == least and (count < fewest or (count == fewest and id < best)))
    if better then best, least, fewest = id, open, count end
  end
  chosen = best
end
if session ~= '' then
  if home ~= chosen then
    if home then forget(session) end
    redis.call('HSET', HOMES, session, chosen)
    redis.call('HINCRBY', COUNTS, chosen, 1)
  end
  redis.call('ZADD', SESSIONS, now + ARGV[3], session)
  for _, key in ipairs({SESSIONS, HOMES, COUNTS}) do outlive(key, ARGV[3]) end
end
redis.call('HINCRBY', mine, chosen, 1)
keep_load()
return {chosen, home == chosen and 1 or 0}
"""
)

# ARGV: session
_FINISH = _HEAD + "forget(ARGV[1])\nreturn 1"

# ARGV: router, load ttl ms, replica, count, replica, count, …
_REPORT = (
    _HEAD
    + """
prune(1000)
local key = LOADS .. ARGV[1]
redis.call('DEL', key)
for i = 3, #ARGV, 2 do redis.call('HSET', key, ARGV[i], ARGV[i + 1]) end
if #ARGV > 2 then
  redis.call('PEXPIRE', key, ARGV[2])
  redis.call('ZADD', ROUTERS, now + ARGV[2], ARGV[1])
  outlive(ROUTERS, ARGV[2])
else
  redis.call('ZREM', ROUTERS, ARGV[1])
end
return 1
"""
)

# ARGV: router to leave out ('' for none)
_LOADS = (
    _HEAD
    + """
prune(1000)
local sums = {}
for _, router in ipairs(redis.call('ZRANGE', ROUTERS, 0, -1)) do
  if router ~= ARGV[1] then
    local flat = redis.call('HGETALL', LOADS .. router)
    for i = 1, #flat, 2 do sums[flat[i]] = (sums[flat[i]] or 0) + tonumber(flat[i + 1]) end
  end
end
local out = {}
for id, open in pairs(sums) do
  out[#out + 1] = id
  out[#out + 1] = open
end
return out
"""
)


class Choice(msgspec.Struct, frozen=True):
    """Where a request goes. ``bound``: its session was there before."""

    replica: str
    bound: bool


class Sessions:
    """The policy ``sticky_least_loaded``.

    A session stays on its replica while that is ready; a new one, or one whose replica is gone, goes to the ready
    replica with the fewest open requests (all routers together), then the fewest sessions, then by id.

    Invariants: the three session structures agree; a session has one home; what a router has open is that router's hash
    alone, so that a dead router's load vanishes with its expiry. All times are the server's.
    """

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._keys = [keys.sessions, keys.homes, keys.session_counts, keys.routers, keys.ready, keys.loads]
        self._choose = redis.register_script(_CHOOSE)
        self._finish = redis.register_script(_FINISH)
        self._report = redis.register_script(_REPORT)
        self._loads = redis.register_script(_LOADS)

    async def choose(
        self,
        session: str | None,
        *,
        router: str,
        ttl: float,
        load_ttl: float,
        exclude: Iterable[str] = (),
        preferred: str | None = None,
        changes: Mapping[str, int] | None = None,
    ) -> Choice | None:
        """Chooses, binds the session and counts one open request of ``router``; None when no replica is left.

        ``changes`` of the router's load since it was last told are applied first, so that the choice sees them.
        ``preferred`` is where the caller last saw the session: a store that lost its data takes it over. ``ttl`` and
        ``load_ttl`` are seconds until the session, and the router's load, expire when nothing renews them.
        """
        times = (int(ttl * 1000), int(load_ttl * 1000))
        arguments: list[str | int] = [session or "", router, *times, preferred or "", len(changes or ())]
        for replica, change in (changes or {}).items():
            arguments += (replica, change)
        arguments += exclude
        chosen = await bounded(self._choose(self._keys, arguments))
        return Choice(chosen[0].decode(), bool(chosen[1])) if chosen else None

    async def finish(self, session: str) -> None:
        """Forgets a session."""
        await bounded(self._finish(self._keys, [session]))

    async def report(self, router: str, open: Mapping[str, int], *, ttl: float) -> None:
        """Replaces what ``router`` has open per replica: a lost update or a wiped store heals with the next report."""
        flat: list[str | int] = []
        for replica, count in open.items():
            flat += (replica, count)
        arguments: list[str | int] = [router, int(ttl * 1000), *flat]
        await bounded(self._report(self._keys, arguments))

    async def loads(self, *, but: str | None = None) -> dict[str, int]:
        """Open requests per replica over all live routers, ``but`` one."""
        flat = await bounded(self._loads(self._keys, [but or ""]))
        return {flat[i].decode(): int(flat[i + 1]) for i in range(0, len(flat), 2)}
