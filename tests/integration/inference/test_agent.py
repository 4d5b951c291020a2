"""The agent as a process, on real NATS and Redis, around a scripted engine."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rollstream.core.bus import Bus
from rollstream.core.run import RunDir
from rollstream.core.store import Lease, Store
from support.scripted_engine import COMMAND
from support.weight_versions import write_version


async def until(condition: Callable[[], Awaitable[Any]], what: str, timeout: float = 15.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (found := await condition()):
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.05)
    return found


class Site:
    """A run with its bus and store, and the way to start replicas in it."""

    def __init__(self, run_dir: RunDir, bus: Bus, store: Store, nats_url: str, redis_url: str) -> None:
        self.run_dir, self.bus, self.store = run_dir, bus, store
        self.nats_url, self.redis_url = nats_url, redis_url

    async def announce(self, version: int, **damage: Any) -> None:
        await self.bus.weights.announce(write_version(self.run_dir.path, 1, version, **damage))

    async def lease(self, replica: str = "r0") -> Lease | None:
        return next((lease for lease in await self.store.registry.list("inference") if lease.id == replica), None)

    async def ready(self, version: int, replica: str = "r0") -> Lease:
        async def look() -> Lease | None:
            lease = await self.lease(replica)
            return lease if lease and lease.state == "ready" and lease.version == version else None

        return await until(look, f"{replica} ready with v{version}")  # type: ignore[no-any-return]

    @asynccontextmanager
    async def agent(self, *engine_arguments: str, **settings: Any) -> AsyncIterator[asyncio.subprocess.Process]:
        config = {
            "run_dir": str(self.run_dir.path), "replica_id": "r0", "heartbeat": 0.2, "lease_seconds": 2.0,
            "engine_command": [*COMMAND, *engine_arguments], "bus": {"url": self.nats_url},
            "store": {"url": self.redis_url}, "model": {"name": "scripted"}, **settings,
        }  # fmt: skip
        path = self.run_dir.path / "inference.toml"
        path.write_text(_toml(config))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "rollstream.inference.main", "@", str(path),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
            output, _ = await asyncio.wait_for(process.communicate(), 20)
            print(output.decode())


def _toml(table: dict[str, Any]) -> str:
    plain = [f"{key} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, dict)]
    nested = [f"[{key}]\n{_toml(value)}" for key, value in table.items() if isinstance(value, dict)]
    return "\n".join([*plain, *nested])


@pytest.fixture
async def site(tmp_path: Path, nats_server: Any, redis_server: Any) -> AsyncIterator[Site]:
    run_dir = RunDir.create(tmp_path / "run", name="test")
    bus = await Bus.connect(nats_server.url, run_dir.run_id, name="test")
    await bus.create_streams()
    store = await Store.connect(redis_server.url, run_dir.run_id)
    yield Site(run_dir, bus, store, nats_server.url, redis_server.url)
    await store.close()
    await bus.close()


async def test_it_is_routable_only_with_the_newest_weights_and_follows(site: Site) -> None:
    async with site.agent() as process:
        lease = await until(site.lease, "a lease")
        await until(lambda: _state(site, "loading"), "it waits for weights")
        assert (await site.lease()).state == "loading"  # type: ignore[union-attr]
        await site.announce(0)
        lease = await site.ready(0)
        for version in (1, 2, 3):
            await site.announce(version)
        lease = await site.ready(3)
        async with aiohttp.ClientSession() as http:
            body = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 3}}
            async with http.post(f"{lease.address}/inference/v1/generate", json=body) as answer:
                choice = (await answer.json())["choices"][0]
        assert choice["weight_versions"] == [{"version": "1:3", "start": 0, "end": 3}]
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 15) == 0
        assert await site.lease() is None


async def _state(site: Site, state: str) -> bool:
    lease = await site.lease()
    return lease is not None and lease.state == state


async def test_a_damaged_version_is_an_event_and_no_longer_routable(site: Site) -> None:
    async with site.agent():
        await site.announce(0)
        await site.ready(0)
        await site.announce(1, flip=True)
        await until(lambda: _state(site, "failed"), "failed")
        assert "v1 of timeline 1" in (await site.lease()).detail  # type: ignore[union-attr]
        reader = site.bus.read("EVENTS", subject=site.bus.subjects.event("weights_failed"))
        event = await reader.next(5)
        await reader.close()
        assert event is not None and "model.safetensors" in event.record.message  # type: ignore[union-attr]
        await site.announce(2)
        await site.ready(2)


async def test_a_wiped_redis_has_the_lease_again_within_a_heartbeat(site: Site) -> None:
    async with site.agent():
        await site.announce(0)
        await site.ready(0)
        await site.store.redis.flushall()
        assert await site.lease() is None
        await site.ready(0)


async def test_a_killed_agent_leaves_neither_engine_nor_lease(site: Site) -> None:
    async with site.agent() as process:
        await site.announce(0)
        await site.ready(0)
        (engine,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGKILL)
        await process.wait()

        async def gone() -> bool:
            return not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE

        await until(gone, "the engine is gone", 5)

        async def expired() -> bool:
            return await site.lease() is None

        await until(expired, "the lease expired", 5)


async def test_a_killed_engine_comes_back_with_the_newest_weights(site: Site) -> None:
    async with site.agent() as process:
        await site.announce(4)
        before = await site.ready(4)
        (engine,) = psutil.Process(process.pid).children()
        engine.kill()

        async def left() -> bool:
            lease = await site.lease()
            return lease is not None and (lease.state != "ready" or lease.address != before.address)

        await until(left, "noticed")
        after = await site.ready(4)
        assert after.address != before.address


@pytest.mark.parametrize(
    ("settings", "message", "status"),
    [
        ({"bus": {"url": "nats://127.0.0.1:9", "connect_timeout": 0.5}}, "nats://127.0.0.1:9", 2),
        ({"store": {"url": "redis://127.0.0.1:9/0", "connect_timeout": 0.5}}, "127.0.0.1:9", 2),
        ({"model": {"name": "/no/such/model"}}, "/no/such/model", 2),
        ({"run_dir": "/no/such/run"}, "/no/such/run", 2),
        ({"vllm": {"logprobs_mode": "raw_logits"}}, "inference.vllm.logprobs_mode", 2),
        ({"engine_command": ["/no/such/program"]}, "cannot start /no/such/program", 1),
        ({"engine_command": [sys.executable, "-c", "exit('no engine today')"]}, "no engine today", 1),
    ],
    ids=["bus", "store", "model", "run", "argument", "program", "engine"],
)
async def test_it_ends_with_a_message_when_it_cannot_start(
    site: Site, settings: dict[str, Any], message: str, status: int
) -> None:
    async with site.agent(**settings) as process:
        assert process.stdout is not None
        output = (await asyncio.wait_for(process.stdout.read(), 20)).decode()
        assert await process.wait() == status
    assert message in output
    assert "Traceback" not in output
