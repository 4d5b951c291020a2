"""Connections of the trainer to bus and store."""

from __future__ import annotations

from pathlib import Path

from rollstream.core.bus import Bus
from rollstream.core.config import TrainerConfig
from rollstream.core.errors import UsageError
from rollstream.core.run import RunDir
from rollstream.core.store import Store

_ALONE = "give it, start everything with `rollstream rl`, or train on made-up data with --fake-data"


async def connect_bus(config: TrainerConfig, run: RunDir, name: str) -> Bus:
    """The bus of ``run``; raises ``UsageError`` when it is not configured or away."""
    if config.bus.url is None:
        raise UsageError("the trainer needs --bus.url", hint=_ALONE)
    return await Bus.connect(
        config.bus.url, run.run_id, name=name, connect_timeout=config.bus.connect_timeout,
        credentials=_secret(config.bus.credentials_file),
    )


async def connect_store(config: TrainerConfig, run: RunDir) -> Store:
    """The store of ``run``; raises ``UsageError`` when it is not configured, away or evicting."""
    if config.store.url is None:
        raise UsageError("the trainer needs --store.url", hint=_ALONE)
    return await Store.connect(
        config.store.url, run.run_id, connect_timeout=config.store.connect_timeout,
        password=_secret(config.store.password_file),
    )


def _secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="correct its path or its mode") from error
