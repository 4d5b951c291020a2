"""Every key in Redis, declared once. All of a run share one hash tag, so that a script may touch them together."""

from __future__ import annotations

OUTLIVE = """
local function outlive(key, ms)
  local left = redis.call('PTTL', key)
  if left ~= -2 and left < tonumber(ms) then redis.call('PEXPIRE', key, ms) end
end
"""
"""Lua that scripts begin with: a key lives as long as the longest entry in it, so that a killed run leaves none."""


class Keys:
    """Keys of one run: ``rs:{<run>}:…``. Every one of them expires by itself once nobody writes any more."""

    def __init__(self, run: str) -> None:
        self.prefix = f"rs:{{{run}}}:"
        self.sessions = self.prefix + "sessions"
        """Sorted set: session → time of expiry in ms."""
        self.homes = self.prefix + "session-homes"
        """Hash: session → replica."""
        self.session_counts = self.prefix + "session-counts"
        """Hash: replica → sessions on it."""
        self.routers = self.prefix + "load-routers"
        """Sorted set: router → time in ms until which its load counts."""
        self.loads = self.prefix + "load:"
        """Prefix of the hashes replica → open requests, one a router."""
        self.ready = self.prefix + "ready"
        """Sorted set: inference replicas that take requests → expiry of their lease in ms."""
        self.progress = self.prefix + "progress"
        """Hash: component and id → what it is doing or waiting for."""

    def leases(self, role: str) -> str:
        """Hash: id → lease."""
        return f"{self.prefix}leases:{role}"

    def lease_expiries(self, role: str) -> str:
        """Sorted set: id → expiry of its lease in ms."""
        return f"{self.prefix}lease-expiries:{role}"
