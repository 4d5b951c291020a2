"""Entry point of the env worker: configuration in, service out."""

from __future__ import annotations

import asyncio
import logging
import sys

from rollstream.core.config import EnvWorkerConfig
from rollstream.core.config.load import load_config
from rollstream.core.errors import run_main
from rollstream.core.tasks import shutdown_event
from rollstream.core.telemetry import configure_logging
from rollstream.orchestrator.connections import connections
from rollstream.orchestrator.worker.service import EnvWorkerService


async def run(config: EnvWorkerConfig) -> None:
    """Connect and play until SIGTERM, SIGINT or the end of the run."""
    stop = shutdown_event()
    async with connections(config, "env worker") as (_, bus, store):
        await EnvWorkerService(config, bus, store).serve(stop)


def main() -> int:
    """``rollstream-env-worker @ orchestrator.toml``; returns the exit code."""

    def start() -> None:
        config = load_config(EnvWorkerConfig, sys.argv[1:], prog="rollstream-env-worker")
        configure_logging(config.log, "env-worker")
        if config.log.level != "debug":
            # One line an episode and more: nobody reads it, and at hundreds of episodes a second it costs.
            for library in ("verifiers", "renderers"):
                logging.getLogger(library).setLevel(logging.WARNING)
        asyncio.run(run(config))

    return run_main(start)


if __name__ == "__main__":
    sys.exit(main())
