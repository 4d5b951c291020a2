"""A whole loop without torch: real NATS, Redis, router, replica agent (scripted engine), orchestrator and env workers.

The trainer is played by :meth:`LoopSite.train`: it follows the chain and announces one version a batch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from rollstream.core.bus import Bus
from rollstream.core.run import RunDir
from rollstream.core.store import Store
from rollstream.core.wire import Batch
from support.scripted_engine import COMMAND
from support.tiny_model import make_tokenizer
from support.until import until
from support.weight_versions import write_version

TASKSETS = Path(__file__).parent / "tasksets"


@dataclass
class LoopSite:
    """One run and the way to start its programs. Every program is ended by its context, by pid."""

    run: RunDir
    bus: Bus
    store: Store
    nats_url: str
    redis_url: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> Path:
        """A directory with nothing but a tokenizer and a config: nobody here loads weights."""
        path = self.run.path / "tokenizer"
        if not path.exists():
            make_tokenizer().save_pretrained(path)
            (path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
        return path

    def config(self, name: str, **settings: Any) -> Path:
        """A configuration file for one program."""
        table = {
            "run_dir": str(self.run.path), "bus": {"url": self.nats_url}, "store": {"url": self.redis_url}, **settings,
        }
        path = self.run.path / f"{name}.json"
        path.write_text(json.dumps(table))
        return path

    def orchestrator_config(self, name: str = "orchestrator", **settings: Any) -> Path:
        defaults: dict[str, Any] = {
            "model": {"name": str(self.model)}, "max_steps": 4, "seq_len": 128, "groups_per_batch": 2, "group_size": 3,
            "sampling": {"max_tokens": 6}, "train": [{"id": "toy-words"}],
            "workers": {"concurrency": 16, "lease_seconds": 3.0},
        }
        return self.config(name, **{**defaults, **self.settings, **settings})

    @asynccontextmanager
    async def program(
        self, module: str, config: Path, *, failpoint: str = ""
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """``python -m module @ config``; its output ends up in the test's."""
        path = os.pathsep.join([str(TASKSETS), os.environ.get("PYTHONPATH", "")])
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, "@", str(config),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": path, "ROLLSTREAM_FAILPOINT": failpoint, "HF_HUB_OFFLINE": "1"},
        )
        reading = asyncio.create_task(process.communicate())
        try:
            yield process
        finally:
            if process.returncode is None:
                process.terminate()
                with suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), 15)
            if process.returncode is None:
                process.kill()
            output, _ = await reading
            print(f"--- {module} ({process.returncode})\n{output.decode(errors='replace')}")

    @asynccontextmanager
    async def serving(self, **behaviour: Any) -> AsyncIterator[None]:
        """A router and one replica; v0 is announced."""
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in behaviour.items()]
        replica = self.config(
            "inference", replica_id="r0", heartbeat=0.2, lease_seconds=3.0, model={"name": "scripted"},
            engine_command=[*COMMAND, "--vocabulary", "16", *arguments],
        )
        if await self.bus.weights.newest(1) is None:
            await self.announce(0)
        async with (
            self.program("rollstream.inference.main", replica),
            self.program("rollstream.router.main", self.config("router", registry_interval=0.1)),
        ):
            await until(lambda: self._leases("inference"), 30)
            await until(lambda: self._leases("router"), 30)
            yield

    async def _leases(self, role: Any) -> bool:
        return any(lease.state == "ready" for lease in await self.store.registry.list(role))

    @asynccontextmanager
    async def orchestrator(
        self, *, failpoint: str = "", **settings: Any
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        path = self.orchestrator_config(**settings)
        async with self.program("rollstream.orchestrator.main", path, failpoint=failpoint) as process:
            yield process

    @asynccontextmanager
    async def worker(
        self, name: str = "w0", *, failpoint: str = "", **settings: Any
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        path = self.orchestrator_config(name, worker_id=name, **settings)
        async with self.program("rollstream.orchestrator.worker.main", path, failpoint=failpoint) as process:
            yield process

    async def announce(self, version: int, commit: str = "") -> None:
        notice = write_version(self.run.path, 1, version)
        await self.bus.weights.announce(msgspec.structs.replace(notice, commit=commit))

    async def train(self, steps: int, *, on_batch: Callable[[Batch], None] | None = None, seconds: float = 0.0) -> None:
        """Follow the chain up to ``steps`` and announce the version of each batch."""
        newest = await self.bus.weights.newest(1)
        reader = self.bus.chain_reader(after_step=newest.version if newest else 0)
        done = newest.version if newest else 0
        while done < steps:
            found = await reader.next(1.0)
            if found is None:
                continue
            stored, batch = found
            if on_batch is not None:
                on_batch(batch)
            await asyncio.sleep(seconds)
            await self.announce(batch.step, stored.digest)
            done = batch.step
        await reader.close()
