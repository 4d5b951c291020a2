"""The replica's state machine against a scripted engine process: what goes wrong, and the way back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from rollstream.core.config import InferenceConfig, ModelConfig
from rollstream.core.wire import WeightNotice
from rollstream.inference.engine import EngineFailed, EngineProcess
from rollstream.inference.replica import Replica
from support.scripted_engine import COMMAND
from support.weight_versions import write_version


async def until(condition: Callable[[], bool], what: str, timeout: float = 15.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        await asyncio.sleep(0.02)


class Bench:
    """A replica around a scripted engine, with its events."""

    def __init__(self, run_dir: Path, *arguments: str, load_timeout: float = 5.0, start_timeout: float = 20.0) -> None:
        self.run_dir = run_dir
        self.events: list[tuple[str, str]] = []
        config = InferenceConfig(
            model=ModelConfig(name="scripted"), engine_command=[*COMMAND, *arguments], start_timeout=start_timeout
        )
        self.engine = EngineProcess(config, run_dir / "engine.log", "secret", cpu=True)
        self.replica = Replica(
            self.engine, run_dir, load_timeout, lambda kind, message, level: self.events.append((kind, message)),
            lambda: None,
        )

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]

    async def behave(self, **flags: Any) -> None:
        url = f"{self.engine.url}/scripted/behaviour"
        async with aiohttp.ClientSession() as session, session.post(url, json=flags) as response:
            assert response.status == 200


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    task = asyncio.create_task(bench.replica.run())
    try:
        yield bench
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert bench.engine.pid is None


@pytest.fixture
def publish(tmp_path: Path) -> Callable[..., WeightNotice]:
    return lambda version, timeline=1, **damage: write_version(tmp_path, timeline, version, **damage)


async def test_it_joins_only_with_the_newest_version(tmp_path: Path, publish: Callable[..., WeightNotice]) -> None:
    async with running(Bench(tmp_path)) as bench:
        await until(lambda: bench.replica.state == "loading", "the engine answers")
        await bench.behave(load_delay=0.3)
        bench.replica.notice(publish(0))
        await asyncio.sleep(0.1)
        bench.replica.notice(publish(1))
        await until(lambda: bench.replica.state == "ready", "ready")
        assert bench.replica.loaded is not None and bench.replica.loaded.version == 1


async def test_versions_that_are_overtaken_are_skipped(tmp_path: Path, publish: Callable[..., WeightNotice]) -> None:
    async with running(Bench(tmp_path)) as bench:
        bench.replica.notice(publish(0))
        await until(lambda: bench.replica.state == "ready", "ready")
        await bench.behave(load_delay=0.3)
        for version in (1, 2, 3, 4):
            bench.replica.notice(publish(version))
            await asyncio.sleep(0.02)
        await until(lambda: bench.replica.loaded is not None and bench.replica.loaded.version == 4, "v4")
        assert bench.replica.state == "ready"
        assert [message.split()[0] for kind, message in bench.events if kind == "weights_loaded"] == ["v0", "v1", "v4"]


async def test_a_new_timeline_outranks_higher_versions(tmp_path: Path, publish: Callable[..., WeightNotice]) -> None:
    async with running(Bench(tmp_path)) as bench:
        bench.replica.notice(publish(7))
        bench.replica.notice(publish(3, timeline=2))
        bench.replica.notice(publish(8))
        await until(lambda: bench.replica.state == "ready", "ready")
        assert (await bench.replica.client.status(5))["version"] == "2:3"  # type: ignore[union-attr]


async def test_a_damaged_version_takes_it_out_of_routing_until_the_next(
    tmp_path: Path, publish: Callable[..., WeightNotice]
) -> None:
    async with running(Bench(tmp_path)) as bench:
        bench.replica.notice(publish(0))
        await until(lambda: bench.replica.state == "ready", "ready")
        bench.replica.notice(publish(1, flip=True))
        await until(lambda: bench.replica.state == "failed", "failed")
        assert "model.safetensors" in bench.replica.reason
        # The engine itself still serves what it had, for requests in flight.
        assert (await bench.replica.client.status(5))["version"] == "1:0"  # type: ignore[union-attr]
        bench.replica.notice(publish(2))
        await until(lambda: bench.replica.state == "ready", "ready again")
        assert bench.replica.restarts == 0


async def test_a_failed_load_is_retried(tmp_path: Path, publish: Callable[..., WeightNotice]) -> None:
    async with running(Bench(tmp_path, "--failing-loads", "2")) as bench:
        bench.replica.notice(publish(0))
        await until(lambda: bench.replica.state == "ready", "ready")
        assert bench.kinds().count("weights_failed") == 2
        assert bench.replica.restarts == 0


@pytest.mark.parametrize("fault", [{"fatal_loads": 1}, {"hang_loads": True}])
async def test_a_half_loaded_or_late_engine_is_replaced(
    tmp_path: Path, publish: Callable[..., WeightNotice], fault: dict[str, Any]
) -> None:
    async with running(Bench(tmp_path, load_timeout=0.5)) as bench:
        bench.replica.notice(publish(0))
        await until(lambda: bench.replica.state == "ready", "ready")
        first = bench.engine.pid
        await bench.behave(**fault)
        bench.replica.notice(publish(1))
        await until(lambda: bench.replica.state == "failed", "failed")
        await until(lambda: bench.replica.state == "ready", "ready again")
        assert bench.engine.pid != first
        assert bench.replica.loaded is not None and bench.replica.loaded.version == 1
        assert "engine_failed" in bench.kinds()


async def test_a_killed_engine_is_restarted_with_the_newest_weights(
    tmp_path: Path, publish: Callable[..., WeightNotice]
) -> None:
    async with running(Bench(tmp_path)) as bench:
        bench.replica.notice(publish(5))
        await until(lambda: bench.replica.state == "ready", "ready")
        pid = bench.engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: bench.replica.state != "ready", "noticed")
        await until(lambda: bench.replica.state == "ready", "ready again")
        assert bench.engine.pid != pid
        assert (await bench.replica.client.status(5))["version"] == "1:5"  # type: ignore[union-attr]


async def test_an_engine_that_does_not_start_names_its_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "--no-such-flag")
    with pytest.raises(EngineFailed, match=r"exited with 2[\s\S]*unrecognized arguments: --no-such-flag"):
        await bench.engine.start("base")
    with pytest.raises(EngineFailed, match="exited with 2"):
        await asyncio.wait_for(bench.replica.run(), 10)
    assert bench.replica.state == "failed"
    slow = Bench(tmp_path, "--unhealthy", "yes", start_timeout=1.0)
    with pytest.raises(EngineFailed, match=r"did not answer within 1 s; raise inference.start_timeout"):
        await slow.engine.start("base")
    assert slow.engine.pid is None


def test_the_engine_dies_with_its_agent(tmp_path: Path) -> None:
    script = textwrap.dedent(f"""
        import asyncio, pathlib
        from rollstream.core.config import InferenceConfig, ModelConfig
        from rollstream.inference.engine import EngineProcess
        async def main():
            config = InferenceConfig(model=ModelConfig(name="m"), engine_command={COMMAND!r})
            engine = EngineProcess(config, pathlib.Path({str(tmp_path)!r}) / "engine.log", "secret", cpu=True)
            await engine.start("base")
            print(engine.pid, flush=True)
            await asyncio.sleep(60)
        asyncio.run(main())
    """)
    agent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert agent.stdout is not None
        engine = psutil.Process(int(agent.stdout.readline()))
        agent.kill()
        deadline = time.monotonic() + 5
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the engine outlived its agent"
            time.sleep(0.05)
    finally:
        agent.kill()
        agent.wait(5)


async def test_draining_waits_for_requests_in_flight(tmp_path: Path, publish: Callable[..., WeightNotice]) -> None:
    async with running(Bench(tmp_path, "--token-delay", "0.05")) as bench:
        bench.replica.notice(publish(0))
        await until(lambda: bench.replica.state == "ready", "ready")
        answer: Awaitable[Any] = asyncio.create_task(generate(bench.engine.url, max_tokens=10))
        await asyncio.sleep(0.1)
        await bench.replica.drain(5.0)
        assert bench.replica.state == "draining"
        assert (await asyncio.wait_for(answer, 0.2))["choices"][0]["finish_reason"] == "length"


async def generate(url: str, max_tokens: int) -> Any:
    body = {"token_ids": [4, 5], "sampling_params": {"max_tokens": max_tokens}}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/inference/v1/generate", json=body) as response:
        return await response.json()
