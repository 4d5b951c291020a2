"""The engine process: started with a deadline, watched, stopped with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from rollstream.core.config import InferenceConfig
from rollstream.core.errors import RollstreamError
from rollstream.core.leash import hold_to
from rollstream.inference.announce import announced
from rollstream.inference.arguments import command, cores, environment
from rollstream.inference.client import EngineClient, EngineRefused

STOP_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL."""


class EngineFailed(RollstreamError):
    """The engine did not come up or went away; the message holds the log's tail."""


class EngineProcess:
    """One engine process group, from :meth:`start` to :meth:`stop`.

    Invariants: the group is killed when this process dies (also by SIGKILL); :meth:`stop` returns with no member of
    the group alive; a started engine is either ready within ``start_timeout`` or stopped.
    """

    def __init__(self, config: InferenceConfig, log_path: Path, admin_token: str, cpu: bool) -> None:
        self._config = config
        self._log_path = log_path
        self._token = admin_token
        self._cpu = cpu
        self._scratch = tempfile.TemporaryDirectory(prefix="rollstream-engine-")
        self._process: asyncio.subprocess.Process | None = None
        self._affinity = cores(config.cpu_cores) if cpu and config.cpu_cores else None
        self.url = ""

    @property
    def pid(self) -> int | None:
        """Pid of the engine's first process, while there is one."""
        return self._process.pid if self._process else None

    async def start(self, label: str) -> EngineClient:
        """Start the engine and return a client once it answers. Raises :class:`EngineFailed`."""
        announce = Path(self._scratch.name) / "url"
        announce.unlink(missing_ok=True)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        argv = command(self._config, announce, label, self._cpu)
        with self._log_path.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self._config, self._token, self._cpu),
                    start_new_session=True,
                    preexec_fn=functools.partial(_begin, os.getpid(), self._affinity),
                )
            except (OSError, subprocess.SubprocessError) as error:
                raise EngineFailed(
                    f"cannot start {argv[0]}: {error}; check inference.engine_command and inference.cpu_cores"
                ) from error
        try:
            return await self._ready(announce)
        except BaseException:
            await self.stop()
            raise

    async def _ready(self, announce: Path) -> EngineClient:
        assert self._process is not None
        deadline = time.monotonic() + self._config.start_timeout
        client: EngineClient | None = None
        try:
            while time.monotonic() < deadline:
                if self._process.returncode is not None:
                    raise EngineFailed(f"the engine exited with {self._process.returncode}{self.log_tail()}")
                if client is None and (url := announced(announce)):
                    self.url = url
                    client = EngineClient(url, self._token)
                if client is not None:
                    with contextlib.suppress(EngineRefused):
                        await client.liveness(timeout=max(deadline - time.monotonic(), 1.0))
                        ready, client = client, None
                        return ready
                await asyncio.sleep(0.1)
        finally:
            if client is not None:
                await client.close()
        raise EngineFailed(
            f"the engine did not answer within {self._config.start_timeout:g} s; raise "
            f"inference.start_timeout or look into the log{self.log_tail()}"
        )

    async def wait(self) -> int:
        """Wait for the engine's first process to end and return its exit status."""
        assert self._process is not None, "start comes first"
        return await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM to the group, SIGKILL after :data:`STOP_GRACE`; returns when the group is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE):
                await process.wait()
        _signal_group(process.pid, signal.SIGKILL)
        await process.wait()

    def log_tail(self, lines: int = 15) -> str:
        """The log's last lines, ready to be put behind a message."""
        try:
            text = self._log_path.read_bytes()[-20_000:].decode(errors="replace")
        except OSError:
            return ""
        return f"\n--- {self._log_path} ---\n" + "\n".join(text.splitlines()[-lines:])


def _begin(parent: int, affinity: set[int] | None) -> None:
    """Runs in the child between fork and exec."""
    hold_to(parent)
    if affinity is not None:
        os.sched_setaffinity(0, affinity)


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
