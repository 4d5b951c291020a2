"""What the agent asks of its engine, over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp


class EngineRefused(RuntimeError):
    """The engine did not do what was asked. ``fatal``: it must not serve again before a restart (a model that is half
    loaded, or an answer that missed its deadline)."""

    def __init__(self, message: str, *, fatal: bool = False) -> None:
        super().__init__(message)
        self.fatal = fatal


class EngineClient:
    """Client of one engine. Every call has a deadline and raises :class:`EngineRefused` on any failure."""

    def __init__(self, url: str, admin_token: str) -> None:
        self.url = url
        self._session = aiohttp.ClientSession(trust_env=False)
        self._admin = {"Authorization": f"Bearer {admin_token}"}

    async def liveness(self, timeout: float) -> None:
        """A round trip of one token."""
        await self._call("GET", "/liveness", timeout)

    async def status(self, timeout: float) -> dict[str, Any]:
        """``version`` (label), ``in_flight``, ``waiting``, ``kv_usage``, ``capacity`` (sequences at once)."""
        return await self._call("GET", "/rollstream/status", timeout)

    async def load(self, directory: Path, timeline: int, version: int, digest: str, timeout: float) -> float:
        """Load a version directory; returns the seconds for which generation stood still."""
        order = {"directory": str(directory), "timeline": timeline, "version": version, "digest": digest}
        answer = await self._call("POST", "/rollstream/load", timeout, json=order)
        return float(answer["paused_seconds"])

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _call(self, method: str, path: str, timeout: float, **more: Any) -> dict[str, Any]:
        limit = aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(
                method, self.url + path, headers=self._admin, timeout=limit, **more
            ) as response:
                body: dict[str, Any] = await response.json(content_type=None)
                if response.status == 200:
                    return body
                error = body.get("error", {})
                raise EngineRefused(error.get("message", f"HTTP {response.status}"), fatal=bool(error.get("fatal")))
        except TimeoutError as error:
            raise EngineRefused(f"{path}: no answer within {timeout:g} s", fatal=True) from error
        except (aiohttp.ClientError, ValueError, AttributeError) as error:
            raise EngineRefused(f"{path}: {type(error).__name__}: {error}") from error
