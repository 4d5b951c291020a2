"""Entry point of a replica: configuration in, agent out."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path

from rollstream.core.bus import Bus
from rollstream.core.config import InferenceConfig
from rollstream.core.config.load import load_config
from rollstream.core.errors import UsageError, run_main
from rollstream.core.run import RunDir
from rollstream.core.store import Store
from rollstream.core.tasks import shutdown_event
from rollstream.core.telemetry import PrometheusServer, configure_logging
from rollstream.inference.agent import Agent
from rollstream.inference.arguments import check, on_cpu
from rollstream.inference.engine import EngineProcess


async def run(config: InferenceConfig) -> None:
    """Connect, serve until SIGTERM or SIGINT."""
    check(config)
    run_dir = RunDir.open(config.run_dir)
    if config.bus.url is None or config.store.url is None:
        missing = "--bus.url" if config.bus.url is None else "--store.url"
        raise UsageError(f"a replica needs {missing}", hint="give it, or start everything with `rollstream rl`")
    replica_id = config.replica_id or f"{socket.gethostname()}-{os.getpid()}"
    bus = await Bus.connect(
        config.bus.url,
        run_dir.run_id,
        name=f"inference {replica_id}",
        connect_timeout=config.bus.connect_timeout,
        credentials=_secret(config.bus.credentials_file),
    )
    try:
        store = await Store.connect(
            config.store.url,
            run_dir.run_id,
            connect_timeout=config.store.connect_timeout,
            password=_secret(config.store.password_file),
        )
        try:
            engine = EngineProcess(config, run_dir.engine_log(replica_id), secrets.token_hex(16), on_cpu())
            agent = Agent(config, replica_id, bus, store, run_dir, engine)
            async with PrometheusServer(config.metrics_server, agent.metrics.registry) as metrics:
                agent.metrics_address = metrics.address
                await agent.serve(shutdown_event())
        finally:
            await store.close()
    finally:
        await bus.close()


def _secret(path: Path | None) -> str | None:
    return path.read_text().strip() if path else None


def main() -> int:
    """``rollstream-inference @ inference.toml --model.name DIR``; returns the exit code."""

    def start() -> None:
        config = load_config(InferenceConfig, sys.argv[1:], prog="rollstream-inference")
        configure_logging(config.log, "inference")
        asyncio.run(run(config))

    return run_main(start)


if __name__ == "__main__":
    sys.exit(main())
