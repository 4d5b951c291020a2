"""The router as a process: start, signals, exit codes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollstream.core.run import RunDir
from rollstream.core.store import Store
from support.http_calls import Client, fetch
from support.raw_replica import RawReplica
from support.until import until

CHAT = "/v1/chat/completions"


async def registered(store: Store) -> bool:
    return bool(await store.registry.list("router"))


async def load_is(store: Store, replica: str, count: int) -> bool:
    return (await store.sessions.loads()).get(replica, 0) == count


async def start(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rollstream.router.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "200"},
    )


@asynccontextmanager
async def router(arguments: Sequence[str], store: Store) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A running router and its address as the registry has it."""
    process = await start(*arguments)
    try:
        await until(lambda: process.returncode is not None or registered(store), 30)
        assert process.returncode is None, (await process.communicate())[0].decode()
        yield process, (await store.registry.list("router"))[0].address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def run_of(tmp_path: Path, redis_url: str) -> tuple[RunDir, list[str]]:
    run = RunDir.create(tmp_path / "run", name="router-test")
    return run, ["--run-dir", str(tmp_path / "run"), "--store.url", redis_url]


async def test_sigterm_drains_drops_the_lease_and_exits_zero(tmp_path: Path, redis_server: Any) -> None:
    run, arguments = run_of(tmp_path, redis_server.url)
    store = await Store.connect(redis_server.url, run.run_id)
    replica = await RawReplica(store, "a").start()
    async with router([*arguments, "--drain-timeout", "10"], store) as (process, address):
        client = await Client.open(address)
        client.send("POST", CHAT, b"{}", X_Do="sse:20")
        await client.head()
        idle = await Client.open(address)
        process.send_signal(signal.SIGTERM)
        answer_rest = await asyncio.wait_for(client.reader.read(), 10)
        assert answer_rest.endswith(b"data: 19\n\n\r\n0\r\n\r\n"), "the open stream was finished"
        assert await asyncio.wait_for(idle.reader.read(), 5) == b""
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert await store.registry.list("router") == []
        client.close()
        idle.close()
    await replica.stop()
    await store.close()


async def test_the_drain_deadline_breaks_off_what_is_left(tmp_path: Path, redis_server: Any) -> None:
    run, arguments = run_of(tmp_path, redis_server.url)
    store = await Store.connect(redis_server.url, run.run_id)
    replica = await RawReplica(store, "a").start()
    async with router([*arguments, "--drain-timeout", "0.3"], store) as (process, address):
        client = await Client.open(address)
        client.send("POST", CHAT, b"{}", X_Do="hang")
        await until(lambda: replica.open)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 10) == 0
        client.close()
    await replica.stop()
    await store.close()


async def test_a_killed_router_s_load_vanishes_with_its_lease(tmp_path: Path, redis_server: Any) -> None:
    run, arguments = run_of(tmp_path, redis_server.url)
    store = await Store.connect(redis_server.url, run.run_id)
    replica = await RawReplica(store, "a").start()
    async with router([*arguments, "--lease-seconds", "1"], store) as (process, address):
        client = await Client.open(address)
        client.send("POST", CHAT, b"{}", X_Session_ID="s", X_Do="hang")
        await until(lambda: load_is(store, "a", 1))
        process.kill()
        await until(lambda: load_is(store, "a", 0))
        client.close()
    await replica.stop()
    await store.close()


async def test_a_taken_port_is_named_with_its_flag(tmp_path: Path, redis_server: Any) -> None:
    _, arguments = run_of(tmp_path, redis_server.url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await start(*arguments, "--port", str(port))
        output = (await asyncio.wait_for(process.communicate(), 30))[0].decode()
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in output
    assert "--port" in output
    assert "Traceback" not in output


async def test_unusable_settings_exit_2_with_one_message(tmp_path: Path, redis_server: Any) -> None:
    _, arguments = run_of(tmp_path, redis_server.url)
    cases = (
        (["--run-dir", str(tmp_path / "nowhere"), "--store.url", redis_server.url], "nowhere"),
        (arguments[:2], "--store.url"),
        ([*arguments[:2], "--store.url", "redis://127.0.0.1:1", "--store.connect-timeout", "0.5"], "127.0.0.1:1"),
    )
    for given, named in cases:
        process = await start(*given)
        output = (await asyncio.wait_for(process.communicate(), 30))[0].decode()
        assert process.returncode == 2, output
        assert named in output
        assert "Traceback" not in output


async def test_a_replica_is_reached_through_the_process(tmp_path: Path, redis_server: Any) -> None:
    run, arguments = run_of(tmp_path, redis_server.url)
    store = await Store.connect(redis_server.url, run.run_id)
    replica = await RawReplica(store, "a").start()
    async with router(arguments, store) as (_, address):
        answer = await fetch(address, "POST", "/inference/v1/generate", b"{}", X_Session_ID="s")
        assert answer.json() == {"replica": "a", "path": "/inference/v1/generate", "size": 2}
        assert answer.headers["x-rollstream-replica"] == "a"
    await replica.stop()
    await store.close()
