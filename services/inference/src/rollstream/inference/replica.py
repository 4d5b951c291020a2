"""The replica's state machine: one engine, kept alive and kept current. Knows neither NATS nor Redis."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from rollstream.core.wire import WeightNotice
from rollstream.inference.client import EngineClient, EngineRefused
from rollstream.inference.engine import EngineFailed, EngineProcess

State = Literal["starting", "loading", "ready", "failed", "draining"]

LIVENESS_INTERVAL = 15.0
"""Seconds between round trips that prove that the engine still samples."""

LONGEST_BACKOFF = 30.0
"""Seconds between attempts, at most."""


class Report(Protocol):
    """Where the replica tells what an operator wants to know."""

    def __call__(self, kind: str, message: str, level: Literal["info", "warning", "error"]) -> None: ...


@dataclass(frozen=True)
class Backoff:
    """Exponential delays with jitter: ``delay(0)`` is about ``first`` seconds."""

    first: float = 0.5
    longest: float = LONGEST_BACKOFF

    def delay(self, attempt: int) -> float:
        """Seconds to wait after failure number ``attempt`` (0-indexed)."""
        return min(self.first * 2.0 ** min(attempt, 16), self.longest) * random.uniform(0.75, 1.25)


def key(notice: WeightNotice) -> tuple[int, int]:
    """Notices are ordered by timeline, then version: a rewind outranks what it left behind."""
    return notice.timeline, notice.version


class Replica:
    """Lifecycle: :meth:`run` until cancelled; :meth:`notice` at any time; then :meth:`stop`.

    Invariants: ``state`` is ``ready`` only while the engine answers and, when it became so, held the newest version
    that was known; a failed or late load takes the replica out of routing until a later attempt succeeds; an engine
    that died, hangs or is half loaded is replaced.
    """

    def __init__(
        self, engine: EngineProcess, run_dir: Path, load_timeout: float, report: Report, changed: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._run_dir = run_dir
        self._load_timeout = load_timeout
        self._report = report
        self._changed = changed
        self._wake = asyncio.Event()
        self._newest: WeightNotice | None = None
        self._backoff = Backoff()
        self.state: State = "starting"
        self.reason = ""
        self.loaded: WeightNotice | None = None
        self.client: EngineClient | None = None
        self.restarts = 0

    @property
    def newest(self) -> WeightNotice | None:
        """The newest version that was announced to this replica."""
        return self._newest

    @property
    def waits_for(self) -> str:
        """Why this replica takes no requests: a token for progress leases, "" when it does."""
        if self.state == "loading":
            return "first_weights" if self._newest is None else "weight_load"
        return {"starting": "engine_start", "failed": "retry", "draining": "requests_in_flight"}.get(self.state, "")

    def notice(self, notice: WeightNotice) -> None:
        """A version was announced. Versions that are passed over before they load are skipped."""
        if self._newest is None or key(notice) > key(self._newest):
            self._newest = notice
            self._wake.set()

    async def run(self) -> None:
        """Keep an engine alive and current, for ever; raises ``EngineFailed`` when the first does not start."""
        failures = 0
        started = False
        while True:
            self._become("starting")
            self.loaded = None
            try:
                self.client = await self._engine.start("base")
                self._report("engine_ready", f"the engine serves at {self._engine.url}", "info")
                failures, started = 0, True
                await self._keep_current(self.client)
            except (EngineFailed, EngineRefused) as error:
                self._become("failed", str(error))
                self._report("engine_failed", str(error), "error")
                if not started:
                    raise
            finally:
                client, self.client = self.client, None
                if client is not None:
                    await client.close()
                await self._engine.stop()
            await asyncio.sleep(self._backoff.delay(failures))
            failures += 1
            self.restarts += 1

    async def drain(self, timeout: float) -> None:
        """Leave the routing and give requests in flight up to ``timeout`` seconds."""
        self._become("draining")
        client = self.client
        if client is None:
            return
        with contextlib.suppress(TimeoutError, EngineRefused):
            async with asyncio.timeout(timeout):
                while (await client.status(timeout=timeout))["in_flight"]:  # noqa: ASYNC110 — asked over HTTP
                    await asyncio.sleep(0.1)

    async def _keep_current(self, client: EngineClient) -> None:
        """Load each newest version; ends by raising when the engine must be replaced."""
        watch = [
            asyncio.create_task(self._watch_exit(), name="engine exit"),
            asyncio.create_task(self._watch_liveness(client), name="engine liveness"),
            asyncio.create_task(self._follow(client), name="weights"),
        ]
        try:
            done, _ = await asyncio.wait(watch, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watch:
                task.cancel()
            await asyncio.gather(*watch, return_exceptions=True)

    async def _watch_exit(self) -> None:
        status = await self._engine.wait()
        raise EngineFailed(f"the engine ended with status {status}{self._engine.log_tail()}")

    async def _watch_liveness(self, client: EngineClient) -> None:
        while True:
            await asyncio.sleep(LIVENESS_INTERVAL)
            # A round trip queues behind a weight update, which has a deadline of its own.
            await client.liveness(timeout=2 * self._load_timeout)

    async def _follow(self, client: EngineClient) -> None:
        failures = 0
        self._become("loading", "waiting for the first weight notice" if self._newest is None else "")
        while True:
            self._wake.clear()
            target = self._newest
            delay: float | None = None
            if target is not None and (self.loaded is None or key(target) != key(self.loaded)):
                if await self._load(client, target):
                    failures = 0
                    # "ready" waits for the newest: a version announced meanwhile comes first at join.
                    if target is self._newest:
                        self._become("ready")
                else:
                    delay = self._backoff.delay(failures)
                    failures += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._wake.wait()

    async def _load(self, client: EngineClient, target: WeightNotice) -> bool:
        name = f"v{target.version} of timeline {target.timeline}"
        directory = self._run_dir / target.location
        try:
            paused = await client.load(
                directory, target.timeline, target.version, target.digest, timeout=self._load_timeout
            )
        except EngineRefused as error:
            if target is not self._newest and not error.fatal:
                return False  # overtaken, perhaps pruned: the newer one decides
            self._become("failed", f"{name}: {error}")
            self._report("weights_failed", f"{name} was not loaded: {error}", "error")
            if error.fatal:
                raise EngineFailed(f"{name}: {error}; the engine is restarted") from error
            return False
        self.loaded = target
        self._changed()
        self._report("weights_loaded", f"{name} loaded, sampling stood still for {paused * 1000:.0f} ms", "info")
        return True

    def _become(self, state: State, reason: str = "") -> None:
        if self.state != "draining" and (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._changed()
