"""Entry point of the router: configuration in, service out."""

from __future__ import annotations

import sys

import uvloop

from rollstream.core.config.load import load_config
from rollstream.core.config.serving import RouterConfig
from rollstream.core.errors import UsageError, run_main
from rollstream.core.run import RunDir
from rollstream.core.store import Store
from rollstream.core.tasks import shutdown_event
from rollstream.core.telemetry import PrometheusServer, configure_logging
from rollstream.router.service import RouterService


async def run(config: RouterConfig) -> None:
    """Connects to Redis and routes until SIGTERM or SIGINT."""
    run_id = RunDir.open(config.run_dir).run_id
    if config.store.url is None:
        raise UsageError("a router needs --store.url", hint="give it, or start everything with `rollstream rl`")
    password = config.store.password_file.read_text().strip() if config.store.password_file else None
    store = await Store.connect(
        config.store.url, run_id, connect_timeout=config.store.connect_timeout, password=password
    )
    try:
        router = RouterService(config, store)
        async with PrometheusServer(config.metrics_server, router.metrics) as metrics:
            router.metrics_address = metrics.address
            await router.serve(shutdown_event())
    finally:
        await store.close()


def main() -> int:
    """``rollstream-router @ router.toml --port 8000``; returns the exit code."""

    def start() -> None:
        config = load_config(RouterConfig, sys.argv[1:], prog="rollstream-router")
        configure_logging(config.log, "router")
        uvloop.run(run(config))

    return run_main(start)


if __name__ == "__main__":
    sys.exit(main())
