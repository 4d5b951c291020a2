"""Who is there: leases that their owners renew and that expire by the server's clock."""

from __future__ import annotations

from typing import Literal

import msgspec
from redis.asyncio import Redis

from rollstream.core.store.bounded import bounded
from rollstream.core.store.keys import OUTLIVE, Keys

Role = Literal["inference", "router", "trainer", "orchestrator", "env-worker"]
State = Literal["starting", "loading", "ready", "draining", "failed"]


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """One live process and what others need to know of it. Addresses are ``http://host:port`` or empty."""

    id: str
    role: Role
    address: str = ""
    admin: str = ""
    metrics: str = ""
    model: str = ""
    state: State = "starting"
    timeline: int = 0
    version: int = -1
    """Policy version that it serves; -1 before the first."""
    capacity: int = 0
    inflight: int = 0
    kv_usage: float = 0.0
    pid: int = 0
    host: str = ""
    detail: str = ""
    expires: float = 0.0
    """Unix time of the server, set by the store."""


# KEYS: leases, expiries, ready. ARGV: id, lease, ttl ms, '1' when it takes requests.
_PUT = (
    OUTLIVE
    + """
local t = redis.call('TIME')
local expires = t[1] * 1000 + math.floor(t[2] / 1000) + ARGV[3]
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], expires, ARGV[1])
if ARGV[4] == '1' then redis.call('ZADD', KEYS[3], expires, ARGV[1]) else redis.call('ZREM', KEYS[3], ARGV[1]) end
for _, key in ipairs(KEYS) do outlive(key, ARGV[3]) end
return 1
"""
)

# KEYS: leases, expiries, ready. Returns lease, expiry ms, lease, expiry ms, …
_LIST = """
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now)) do
  redis.call('HDEL', KEYS[1], id)
  redis.call('ZREM', KEYS[2], id)
end
redis.call('ZREMRANGEBYSCORE', KEYS[3], '-inf', now)
local out = {}
local live = redis.call('ZRANGE', KEYS[2], 0, -1, 'WITHSCORES')
for i = 1, #live, 2 do
  local lease = redis.call('HGET', KEYS[1], live[i])
  if lease then
    out[#out + 1] = lease
    out[#out + 1] = live[i + 1]
  end
end
return out
"""


class Registry:
    """Leases by role and id. A lease ends when it is dropped or not renewed for its ttl."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._put = redis.register_script(_PUT)
        self._list = redis.register_script(_LIST)

    def _of(self, role: str) -> list[str]:
        # Only inference leases enter the set that the session script chooses from.
        ready = self._keys.ready if role == "inference" else f"{self._keys.ready}:{role}"
        return [self._keys.leases(role), self._keys.lease_expiries(role), ready]

    async def put(self, lease: Lease, ttl: float) -> None:
        """Writes or renews a lease for ``ttl`` seconds."""
        routable = lease.role == "inference" and lease.state == "ready"
        flag = "1" if routable else "0"
        arguments: list[str | bytes | int] = [lease.id, msgspec.json.encode(lease), int(ttl * 1000), flag]
        await bounded(self._put(self._of(lease.role), arguments))

    async def drop(self, role: Role, id: str) -> None:
        """Ends a lease."""
        leases, expiries, ready = self._of(role)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hdel(leases, id)
            pipe.zrem(expiries, id)
            pipe.zrem(ready, id)
            await bounded(pipe.execute())

    async def list(self, role: Role) -> list[Lease]:
        """Live leases of a role, sorted by id."""
        flat = await bounded(self._list(self._of(role), []))
        leases = [
            msgspec.structs.replace(msgspec.json.decode(flat[i], type=Lease), expires=float(flat[i + 1]) / 1000)
            for i in range(0, len(flat), 2)
        ]
        return sorted(leases, key=lambda lease: lease.id)
