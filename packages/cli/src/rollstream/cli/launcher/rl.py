"""``rollstream rl``: a whole run on this machine, from its configuration to its end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Sequence

from rollstream.cli.attempt import Attempt, open_attempt, record_command, write_resolved
from rollstream.cli.launcher.embedded import Servers
from rollstream.cli.launcher.preflight import check_configuration, check_room, open_run, read_secret, writable
from rollstream.cli.launcher.programs import programs
from rollstream.cli.launcher.signals import StopSignals
from rollstream.cli.launcher.supervisor import Outcome, Supervisor
from rollstream.cli.live import Screen, open_screen
from rollstream.cli.metrics_file import MetricsFile
from rollstream.cli.observe import Observer
from rollstream.cli.resolve import Resolved, resolve
from rollstream.cli.snapshot import take_snapshot
from rollstream.core.bus import Bus, Phase
from rollstream.core.config import RlConfig
from rollstream.core.run import RunDir
from rollstream.core.store import Store
from rollstream.core.telemetry import configure_logging

LOOK_INTERVAL = 0.5
"""Seconds between looks at a run."""

EXIT_INTERRUPTED = 130


def launch_rl(config: RlConfig, argv: Sequence[str]) -> int:
    """Run until the training is complete, fails or is stopped; returns the exit code. Raises ``UsageError``."""
    return asyncio.run(_launch(config, argv))


async def _launch(config: RlConfig, argv: Sequence[str]) -> int:
    # What is wrong with the configuration alone is found before anything is written or started.
    check_configuration(config)
    directory = open_run(config)
    with writable(directory.path):
        attempt = open_attempt(directory.path)
        record_command(attempt, "rl", argv)
        own_log = attempt.log("launcher").open("a", buffering=1)
    # What libraries say belongs into a file: the terminal is the screen's.
    configure_logging(config.log, "launcher", stream=own_log)
    screen = open_screen(config.live)
    launch = f"{directory.run_id}.{attempt.number}.{secrets.token_hex(4)}"
    supervisor = Supervisor(launch, max_restarts=config.max_restarts, grace=config.stop_grace, report=screen.note)
    with own_log, screen, StopSignals(supervisor.kill) as signals:
        screen.note(f"run {directory.path} (id {directory.run_id}, attempt {attempt.number})")
        run = Run(config, directory, attempt, supervisor, screen)
        work = asyncio.create_task(run.until_it_ends(), name="run")
        asked = asyncio.create_task(signals.asked.wait(), name="stop signal")
        await asyncio.wait([work, asked], return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            screen.note("stopping; once more to stop at once")
            work.cancel()
        asked.cancel()
        outcome = await _result(work)
    return conclude(outcome, attempt)


class Run:
    """One launch: servers, then the components, watched until the outcome. Leaves nothing alive, however it ends."""

    def __init__(
        self, config: RlConfig, directory: RunDir, attempt: Attempt, supervisor: Supervisor, screen: Screen
    ) -> None:
        self._config = config
        self._directory = directory
        self._attempt = attempt
        self._supervisor = supervisor
        self._screen = screen
        self._servers = Servers(config, attempt.run_dir, screen.note)

    async def until_it_ends(self) -> Outcome:
        """Start everything and wait. Raises ``RollstreamError`` for what keeps the run from starting or going on."""
        try:
            await self._servers.start()
            async with self._supervisor, self._connections() as (bus, store):
                await bus.create_streams()
                resolved = self._resolve()
                self._supervisor.start(programs(self._attempt, resolved.components()))
                outcome = await self._watch(Observer(bus, store, self._directory.timeline), resolved)
                await self._supervisor.stop()
                if not outcome.ok:
                    await self._mark_failed(bus, outcome)
                return outcome
        finally:
            await asyncio.shield(asyncio.ensure_future(self._servers.stop()))

    @contextlib.asynccontextmanager
    async def _connections(self) -> AsyncIterator[tuple[Bus, Store]]:
        bus_config, store_config = self._config.bus, self._config.store
        bus = await Bus.connect(
            self._servers.bus_url, self._directory.run_id, name="launcher", connect_timeout=bus_config.connect_timeout,
            credentials=read_secret(bus_config.credentials_file, "bus.credentials_file"),
        )  # fmt: skip
        try:
            store = await Store.connect(
                self._servers.store_url, self._directory.run_id, connect_timeout=store_config.connect_timeout,
                password=read_secret(store_config.password_file, "store.password_file"),
            )  # fmt: skip
            try:
                yield bus, store
            finally:
                await store.close()
        finally:
            await bus.close()

    def _resolve(self) -> Resolved:
        resolved = resolve(self._config, self._directory.path, self._servers.bus_url, self._servers.store_url)
        with writable(self._directory.path):
            write_resolved(self._attempt, resolved.components())
        return resolved

    async def _watch(self, observer: Observer, resolved: Resolved) -> Outcome:
        """Show where the run stands until the supervisor knows how it ended or a server cannot be kept."""
        metrics = MetricsFile(self._directory.metrics)
        began = time.monotonic()
        outcome = asyncio.create_task(self._supervisor.outcome(), name="outcome")
        keeper = asyncio.create_task(self._servers.keep(), name="servers")
        try:
            while True:
                ended = outcome.done() or keeper.done()
                facts = await observer.look()
                metrics.refresh()
                self._screen.show(take_snapshot(
                    self._directory.name, resolved.trainer.max_steps, metrics, facts,
                    restarts=self._supervisor.restarts, elapsed=time.monotonic() - began,
                ))  # fmt: skip
                if ended:  # the last look showed how it ended
                    break
                check_room(self._directory.path)
                await asyncio.wait([outcome, keeper], timeout=LOOK_INTERVAL, return_when=asyncio.FIRST_COMPLETED)
            if keeper.done():
                keeper.result()
            return await outcome
        finally:
            for task in (outcome, keeper):
                task.cancel()
            await asyncio.gather(outcome, keeper, return_exceptions=True)

    async def _mark_failed(self, bus: Bus, outcome: Outcome) -> None:
        """The orchestrator has been stopped, so that nobody else writes the phase any more."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5.0):
                intent = await bus.intent.get()
                if not intent.phase.final:
                    await bus.intent.set_phase(Phase.FAILED, epoch=intent.epoch, reason=outcome.reason)


async def _result(work: asyncio.Task[Outcome]) -> Outcome:
    try:
        return await work
    except asyncio.CancelledError:
        return Outcome(False, "stopped by a signal", EXIT_INTERRUPTED)


def conclude(outcome: Outcome, attempt: Attempt) -> int:
    """Say how the run ended, with the reason and the log's tail in one place; returns the exit code."""
    if outcome.ok:
        print(f"done: {attempt.run_dir}")
        return 0
    text = outcome.reason
    if outcome.program is not None:
        text += f"\n--- {outcome.program.log} ---\n{outcome.tail}"
    text += f"\n  → correct the cause, then go on with --resume; all logs: {attempt.logs}"
    if outcome.exit_code != EXIT_INTERRUPTED:
        with contextlib.suppress(OSError):
            (attempt.logs / "failure.txt").write_text(text + "\n")
    print(f"{'stopped' if outcome.exit_code == EXIT_INTERRUPTED else 'failed'}: {text}")
    return outcome.exit_code
