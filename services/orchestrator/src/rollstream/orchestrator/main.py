"""Entry point of the orchestrator: configuration in, service out."""

from __future__ import annotations

import asyncio
import gc
import sys

from rollstream.core.config import OrchestratorConfig
from rollstream.core.config.load import load_config
from rollstream.core.errors import run_main
from rollstream.core.tasks import shutdown_event
from rollstream.core.telemetry import MonitorGroup, configure_logging
from rollstream.orchestrator.connections import connections
from rollstream.orchestrator.service import OrchestratorService

EXIT_STOPPED = 143
"""A signal ended this orchestrator before the run was done."""


async def run(config: OrchestratorConfig) -> int:
    """Connect and orchestrate until the run is done (0), or SIGTERM or SIGINT; returns the exit code."""
    stop = shutdown_event()
    async with connections(config, "orchestrator") as (run_dir, bus, store):
        monitors = MonitorGroup.from_config(
            config.monitors, metrics_path=run_dir.metrics, run_name=run_dir.name, run_id=run_dir.run_id,
            component="orchestrator",
        )
        service = OrchestratorService(config, run_dir, bus, store, monitors)
        # What is loaded by now lives as long as the process; the collector need not walk it again.
        gc.collect()
        gc.freeze()
        try:
            return 0 if await service.serve(stop) else EXIT_STOPPED
        finally:
            monitors.close()


def main() -> int:
    """``rollstream-orchestrator @ orchestrator.toml``; returns the exit code."""

    def start() -> int:
        config = load_config(OrchestratorConfig, sys.argv[1:], prog="rollstream-orchestrator")
        configure_logging(config.log, "orchestrator")
        return asyncio.run(run(config))

    return run_main(start)


if __name__ == "__main__":
    sys.exit(main())
