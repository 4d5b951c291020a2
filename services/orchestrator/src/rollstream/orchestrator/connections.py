"""Opens what both programs of this package need: run directory, bus, store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from rollstream.core.bus import Bus
from rollstream.core.config import ComponentConfig
from rollstream.core.errors import UsageError
from rollstream.core.run import RunDir
from rollstream.core.store import Store


@asynccontextmanager
async def connections(config: ComponentConfig, name: str) -> AsyncIterator[tuple[RunDir, Bus, Store]]:
    """The run directory and open connections for ``name``; raises ``UsageError`` for what is missing or away."""
    run = RunDir.open(config.run_dir)
    if config.bus.url is None or config.store.url is None:
        missing = "--bus.url" if config.bus.url is None else "--store.url"
        raise UsageError(f"{name} needs {missing}", hint="give it, or start everything with `rollstream rl`")
    bus = await Bus.connect(
        config.bus.url,
        run.run_id,
        name=name,
        connect_timeout=config.bus.connect_timeout,
        credentials=_secret(config.bus.credentials_file),
    )
    try:
        store = await Store.connect(
            config.store.url,
            run.run_id,
            connect_timeout=config.store.connect_timeout,
            password=_secret(config.store.password_file),
        )
        try:
            yield run, bus, store
        finally:
            await store.close()
    finally:
        await bus.close()


def _secret(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text().strip()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="correct its path or its mode") from error
