"""``rollstream status``: where a run stands and who waits for what."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from rollstream.cli.launcher.preflight import read_secret
from rollstream.cli.live import rows
from rollstream.cli.metrics_file import MetricsFile
from rollstream.cli.observe import Observer
from rollstream.cli.snapshot import Facts, Snapshot, take_snapshot
from rollstream.core.bus import Bus
from rollstream.core.config import LogConfig, OrchestratorConfig
from rollstream.core.errors import RollstreamError, UsageError
from rollstream.core.run import RunDir
from rollstream.core.store import Store
from rollstream.core.telemetry import configure_logging

CONNECT_TIMEOUT = 2.0
"""Seconds to look for a run's servers; a run that has ended has none."""


def show_status(run: Path, *, as_json: bool) -> int:
    """Print where the run in directory ``run`` stands; returns the exit code. Raises ``UsageError`` for no run."""
    # What does not answer is part of the status; the libraries need not say it too.
    configure_logging(LogConfig(level="error"), "status")
    snapshot = asyncio.run(look_at(run))
    if as_json:
        print(json.dumps(snapshot.as_dict(), indent=2))
        return 0
    print(f"{snapshot.run}: {snapshot.phase}{' (paused)' if snapshot.paused else ''} {snapshot.reason}".rstrip())
    for name, text in rows(snapshot):
        print(f"{name:>10}  {text.replace(chr(10), chr(10) + ' ' * 12)}")
    return 0


async def look_at(run: Path) -> Snapshot:
    """One snapshot of the run, from its servers as far as they answer and from its files."""
    directory = RunDir.open(run)
    config = last_configuration(run)
    metrics = MetricsFile(directory.metrics)
    metrics.refresh()
    try:
        facts = await _ask(config, directory.run_id, directory.timeline)
    except RollstreamError as error:
        facts = Facts(phase="not running", problem=str(error).splitlines()[0])
    return take_snapshot(directory.name, config.max_steps, metrics, facts)


def last_configuration(run: Path) -> OrchestratorConfig:
    """The orchestrator's resolved configuration of the latest attempt: it knows the run's servers."""
    path = run / "configs" / "latest" / "resolved" / "orchestrator.json"
    try:
        return OrchestratorConfig.model_validate_json(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="give a directory that rollstream rl has made") from error


async def _ask(config: OrchestratorConfig, run_id: str, timeline: int) -> Facts:
    credentials = read_secret(config.bus.credentials_file, "bus.credentials_file")
    password = read_secret(config.store.password_file, "store.password_file")
    bus = await Bus.connect(
        str(config.bus.url), run_id, name="status", connect_timeout=CONNECT_TIMEOUT, credentials=credentials
    )
    try:
        store = await Store.connect(
            str(config.store.url), run_id, connect_timeout=CONNECT_TIMEOUT, password=password
        )
        try:
            return await Observer(bus, store, timeline).look()
        finally:
            await store.close()
    finally:
        await bus.close()
