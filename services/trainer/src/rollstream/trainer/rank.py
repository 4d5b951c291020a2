"""One rank of the trainer: ``torchrun … -m rollstream.trainer.rank @ trainer.toml``. Only wires."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import structlog
import torch
from prometheus_client import CollectorRegistry
from transformers.utils import logging

from rollstream.core.bus import Bus, ChainBroken, DigestMismatch
from rollstream.core.config import TrainerConfig
from rollstream.core.config.load import load_config
from rollstream.core.errors import EXIT_USAGE, RollstreamError, first_cause, run_main
from rollstream.core.leash import hold_to
from rollstream.core.run import RunDir
from rollstream.core.tasks import TaskOwner, shutdown_event
from rollstream.core.telemetry import MonitorGroup, PrometheusServer, configure_logging
from rollstream.core.wire import MalformedRecord
from rollstream.trainer import checkpoint
from rollstream.trainer.checkpoint import Found
from rollstream.trainer.compute import Compute
from rollstream.trainer.connect import connect_bus, connect_store
from rollstream.trainer.engine import Engine, Position, config_digest
from rollstream.trainer.fake_data import train_on_fake_data
from rollstream.trainer.follow import Follower
from rollstream.trainer.gauges import Gauges
from rollstream.trainer.launch import LAUNCHER_VARIABLE
from rollstream.trainer.lead import Lead
from rollstream.trainer.leave import end
from rollstream.trainer.loop import RankLoop
from rollstream.trainer.measure import logged_steps
from rollstream.trainer.presence import Presence
from rollstream.trainer.ranks import Ranks

EXIT_STOPPED = 143
"""A signal or a command ended this trainer before the run was complete."""

FATAL = (DigestMismatch, ChainBroken, MalformedRecord)
"""Contradictions on the bus that a restart would only meet again."""

_log = structlog.get_logger(__name__)


class Fatal(RollstreamError):
    """The trainer must not be restarted as it is."""

    exit_code = EXIT_USAGE


def is_deterministic(config: TrainerConfig) -> bool:
    """Whether this process computes deterministically: as configured, by default on CPU only."""
    return config.deterministic if config.deterministic is not None else not torch.cuda.is_available()


async def run(config: TrainerConfig) -> int:
    """Train until the run is complete (0) or stopped (:data:`EXIT_STOPPED`)."""
    run_dir = RunDir.open(config.run_dir)
    compute = Compute(deterministic=is_deterministic(config), threads=config.threads, seed=config.seed)
    stop = shutdown_event()
    bus = await connect_bus(config, run_dir, f"trainer {os.environ.get('RANK', '0')}")
    try:
        await bus.create_streams()
        ranks = await compute(Ranks.join, config.dist_timeout)
        found = await compute(lambda: ranks.from_lead(_latest(config, run_dir) if ranks.is_lead else None))
        engine = await compute(Engine, config, ranks, run_dir, found)
        position, state = _position(found, run_dir)
        async with _lead(config, run_dir, bus, ranks, position, stop) as lead:
            complete = await RankLoop(config, bus, compute, engine, position, state, lead).run()
        await compute(ranks.leave)
    finally:
        await bus.close()
    return 0 if complete else EXIT_STOPPED


def _latest(config: TrainerConfig, run_dir: RunDir) -> Found | None:
    found = checkpoint.latest(run_dir.checkpoints)
    if found is not None:
        _log.info("resuming from a checkpoint", step=found.manifest.step)
        if found.manifest.config_digest != config_digest(config):
            _log.warning("the configuration that decides the numbers has changed since the checkpoint")
    return found


def _position(found: Found | None, run_dir: RunDir) -> tuple[Position, bytes]:
    """Where training stands, and the orchestrator's state as of there."""
    if found is None:
        return Position(0, run_dir.timeline), b""
    manifest = found.manifest
    state = (found.directory / checkpoint.ORCHESTRATOR).read_bytes()
    return Position(manifest.step, manifest.timeline, manifest.commit), state


@contextlib.asynccontextmanager
async def _lead(
    config: TrainerConfig, run_dir: RunDir, bus: Bus, ranks: Ranks, position: Position, stop: asyncio.Event
) -> AsyncIterator[Lead | None]:
    """Rank 0's contacts while the block runs; None on the other ranks."""
    if not ranks.is_lead:
        yield None
        return
    store = await connect_store(config, run_dir)
    gauges = Gauges(CollectorRegistry())
    monitors = MonitorGroup.from_config(
        config.monitors, metrics_path=run_dir.metrics, run_name=run_dir.name, run_id=run_dir.run_id,
        component="trainer", primary=True,
    )
    try:
        async with PrometheusServer(config.metrics_server, gauges.registry) as server, TaskOwner() as owner:
            presence = Presence(store, config.model.name, server.address, lambda: bus.waits_for)
            owner.start(presence.run(), "presence")
            follower = Follower(
                bus, presence, stop, step=position.step, timeline=position.timeline, max_steps=config.max_steps
            )
            await follower.start()
            lead = Lead(
                config, bus, presence, follower, monitors, gauges, run_dir, logged_steps(run_dir.metrics)
            )
            if position.step > 0:
                lead.cover(position.step)  # an earlier life may have died between checkpoint and archive
            try:
                yield lead
            finally:
                await follower.close()
                owner.cancel()
    finally:
        monitors.close()
        await store.close()


def train(config: TrainerConfig) -> int:
    """Run this process as the rank that its environment says it is; returns the exit code."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.fake_data is not None:
        return train_on_fake_data(config, deterministic=is_deterministic(config))
    try:
        return asyncio.run(run(config))
    except Exception as error:
        cause = first_cause(error)
        if isinstance(cause, FATAL):
            raise Fatal(str(cause)) from error
        raise


def main() -> int:
    """One of several ranks, under torchrun."""

    def start() -> int:
        config = load_config(TrainerConfig, sys.argv[1:], prog="rollstream-trainer")
        configure_logging(config.log, "trainer")
        return train(config)

    hold_to(int(os.environ.get(LAUNCHER_VARIABLE, os.getppid())))
    return run_main(start)


if __name__ == "__main__":
    end(main)
