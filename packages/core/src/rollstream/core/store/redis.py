"""The connection to Redis (or Valkey) and what a run keeps there."""

from __future__ import annotations

import asyncio

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError

from rollstream.core.errors import UsageError
from rollstream.core.store.keys import Keys
from rollstream.core.store.progress import ProgressLeases
from rollstream.core.store.registry import Registry
from rollstream.core.store.sessions import Sessions
from rollstream.core.urls import without_credentials

CONNECT_SECONDS = 5.0
MAX_CONNECTIONS = 32


class StoreUnavailable(UsageError):
    """Redis does not answer, or not us."""


class EvictingStore(UsageError):
    """Redis would silently drop keys when it is full."""


class Store:
    """Live state of one run. Nothing here is the only copy of anything: a wiped Redis is rebuilt by heartbeats.

    Lifecycle: ``connect`` → use → ``close``. Calls raise ``redis.RedisError`` or ``OSError`` while Redis is away; the
    connection comes back by itself.
    """

    def __init__(self, redis: Redis, run: str) -> None:
        self.redis = redis
        self.run = run
        self.keys = Keys(run)
        self.registry = Registry(redis, self.keys)
        self.sessions = Sessions(redis, self.keys)
        self.progress = ProgressLeases(redis, self.keys)

    @classmethod
    async def connect(cls, url: str, run: str, *, connect_timeout: float = 30.0, password: str | None = None) -> Store:
        """Connects and checks the eviction policy.

        Raises:
            StoreUnavailable: no answer within ``connect_timeout`` seconds, or the password is refused.
            EvictingStore: ``maxmemory-policy`` is not ``noeviction``.
        """
        shown = without_credentials(url)
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=MAX_CONNECTIONS,
                timeout=CONNECT_SECONDS,
                socket_timeout=None,  # see bounded.py
                socket_connect_timeout=CONNECT_SECONDS,
                retry=Retry(NoBackoff(), 1),  # a connection that a restart broke is replaced; outages are the caller's
                **({"password": password} if password is not None else {}),
            )
        except ValueError as error:
            raise UsageError(f"{shown!r} is not a Redis URL: {error}", hint="give redis://host:port/0") from None
        redis = Redis(connection_pool=pool)
        try:
            await _ping(redis, shown, connect_timeout)
            await _refuse_eviction(redis, shown)
        except BaseException:
            await redis.aclose()
            raise
        return cls(redis, run)

    async def close(self) -> None:
        """Closes all connections."""
        await self.redis.aclose()
        await self.redis.connection_pool.disconnect()


async def _ping(redis: Redis, shown: str, connect_timeout: float) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + connect_timeout
    while True:
        try:
            async with asyncio.timeout_at(deadline):
                await redis.ping()
            return
        except AuthenticationError as error:
            hint = "put the right one into the file that --store.password-file names (mode 0600)"
            raise StoreUnavailable(f"Redis at {shown} refuses the password: {error}", hint=hint) from None
        except (RedisError, OSError) as error:  # TimeoutError is an OSError
            if loop.time() + 0.2 >= deadline:
                hint = "start it there, give another --store.url, or give none to let the launcher start its own"
                message = f"Redis at {shown} did not answer within {connect_timeout:g} s: {error or 'timed out'}"
                raise StoreUnavailable(message, hint=hint) from None
        await asyncio.sleep(0.2)


async def _refuse_eviction(redis: Redis, shown: str) -> None:
    try:
        policy = (await redis.config_get("maxmemory-policy")).get("maxmemory-policy", "noeviction")
    except ResponseError:  # CONFIG is barred on some managed servers; INFO tells the same
        policy = (await redis.info("memory")).get("maxmemory_policy", "noeviction")
    policy = policy.decode() if isinstance(policy, bytes) else str(policy)
    if policy != "noeviction":
        raise EvictingStore(
            f"Redis at {shown} has maxmemory-policy {policy}: it would silently drop leases and sessions",
            hint="set it to noeviction (redis-cli CONFIG SET maxmemory-policy noeviction, and in its redis.conf)",
        )
