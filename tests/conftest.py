"""Fixtures that every suite shares: real servers, a fresh run on them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rollstream.cli.servers import EmbeddedNats, EmbeddedRedis
from rollstream.core.bus import Bus
from rollstream.core.store import Store


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[EmbeddedNats]:
    """A nats-server of this test's own; ``.kill()`` and ``.start()`` keep its port and data."""
    server = EmbeddedNats(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A Redis or Valkey of this test's own."""
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def run_id() -> str:
    return uuid.uuid4().hex[:12]


@pytest.fixture
async def bus(nats_server: EmbeddedNats, run_id: str) -> AsyncIterator[Bus]:
    """A connection with the run's streams created."""
    connection = await Bus.connect(nats_server.url, run_id, name="test", connect_timeout=10)
    await connection.create_streams()
    yield connection
    await connection.close()


@pytest.fixture
async def store(redis_server: EmbeddedRedis, run_id: str) -> AsyncIterator[Store]:
    """A connection to this test's Redis."""
    connection = await Store.connect(redis_server.url, run_id, connect_timeout=10)
    yield connection
    await connection.close()
