"""A trainer process under test, and an orchestrator's writing hand: random rollouts committed as batches."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.core.bus import Bus, CommitChain
from rollstream.core.config import TrainerConfig
from rollstream.core.run import RunDir
from rollstream.core.wire import (
    Array,
    Batch,
    Branch,
    OrchestratorState,
    Rollout,
    Sample,
    VersionSpan,
)
from support.tiny_model import make_tiny_model


def make_rollout(step: int, member: int, *, vocab: int = 100, long: bool = False) -> Rollout:
    """A seeded rollout of v{step − 1}: 4 prompt tokens, 4–16 sampled ones (``long``: its arrays are spilled)."""
    generator = np.random.default_rng((step, member))
    count = 60_000 if long else int(generator.integers(4, 17))
    length = 4 + count
    sampled = np.arange(length) >= 4
    branch = Branch(
        token_ids=Array.of(generator.integers(0, vocab, length), "<i4"),
        sampled=Array.of(sampled, "|b1"),
        logprobs=Array.of(np.where(sampled, -4.6 + 0.1 * generator.normal(size=length), 0), "<f4"),
        temperature=0.7,
        spans=(VersionSpan(timeline=1, version=step - 1, start=4, end=length),),
    )
    return Rollout(
        group=f"g{step}", member=member, kind="train", source="s", task=step, timeline=1, worker="w",
        branches=(branch,), reward=float(generator.random()), started=step, finished=step + 1,
    )


MEMBERS = 4


def make_sample(subject: str, digest: str, rollout: Rollout, member: int, poison: float | None = None) -> Sample:
    """The sample of ``rollout``: advantages of alternating sign on its sampled tokens."""
    sampled = rollout.branches[0].sampled.numpy()
    value = (-1.0) ** member if poison is None or member else poison
    return Sample(subject=subject, digest=digest, branch=0, advantages=Array.of(np.where(sampled, value, 0), "<f4"))


def tiny_settings(tmp_path: Path) -> dict[str, Any]:
    """Trainer settings for tests, with a tiny model made on the spot."""
    make_tiny_model(tmp_path / "model", layers=1, hidden=32)
    return {
        "model": {"name": str(tmp_path / "model")}, "max_steps": 4, "seq_len": 64, "threads": 1,
        "optim": {"lr": 1e-3}, "ckpt": {"interval": 2},
    }


class Committer:
    """Writes rollouts and commits batches, as an orchestrator does. ``open`` takes the chain with a new epoch."""

    def __init__(self, bus: Bus, chain: CommitChain) -> None:
        self.bus = bus
        self.chain = chain

    @classmethod
    async def open(cls, bus: Bus) -> Committer:
        await bus.create_streams()
        chain = await bus.chain()
        await chain.take("test")
        return cls(bus, chain)

    async def commit(self, *, members: int = MEMBERS, long: bool = False, poison: float | None = None) -> Batch:
        """Commit the next batch; ``poison`` replaces the first sample's advantages."""
        step = self.chain.head.step + 1
        samples, last = [], 0
        for member in range(members):
            rollout = make_rollout(step, member, long=long and member == 0)
            result = await self.bus.put_once(self.bus.subjects.rollout("train", rollout.group, member), rollout)
            last = max(last, result.stored.seq)
            samples.append(make_sample(result.stored.subject, result.stored.digest, rollout, member, poison))
        batch = Batch(
            step=step, version=step - 1, samples=tuple(samples), state=OrchestratorState(low_water=last + 1),
            metrics={"train/agg/effective/agent/reward/mean": 0.5, "off_policy/mean": 1.0},
            **self.chain.batch_fields(),  # type: ignore[arg-type]
        )
        await self.chain.append(batch)
        return batch


@dataclass
class TrainerRun:
    """A run directory with a tiny model, and trainer processes on it. ``stop`` ends the one that runs."""

    path: Path
    run_id: str
    nats: str
    redis: str
    settings: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[str] | None = None

    @classmethod
    def create(cls, tmp_path: Path, nats: str, redis: str, **settings: Any) -> TrainerRun:
        run = RunDir.create(tmp_path / "run")
        servers = {"bus": {"url": nats, "connect_timeout": 5}, "store": {"url": redis, "connect_timeout": 5}}
        return cls(
            run.path, run.run_id, nats, redis,
            {**tiny_settings(tmp_path), **servers, "run_dir": str(run.path), **settings},
        )

    @property
    def config_file(self) -> Path:
        return self.path / "configs" / "latest" / "resolved" / "trainer.json"

    def start(self, *, failpoint: str = "", **settings: Any) -> subprocess.Popen[str]:
        config = TrainerConfig.model_validate({**self.settings, **settings})
        self.config_file.parent.mkdir(parents=True, exist_ok=True)
        self.config_file.write_text(config.model_dump_json())
        self.process = self._spawn("rollstream.trainer.main", "@", str(self.config_file), failpoint=failpoint)
        return self.process

    def finish(self, timeout: float = 120.0) -> tuple[int, str]:
        """Exit code and log of the trainer."""
        assert self.process is not None
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output

    def replay(self, *arguments: str, timeout: float = 120.0) -> tuple[int, str]:
        """``rollstream replay`` in a fresh process: exit code and output."""
        process = self._spawn("rollstream.trainer.replay", str(self.path), *arguments)
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate(timeout=10)

    def metrics(self) -> list[dict[str, Any]]:
        file = self.path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def manifest(self, version: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "weights" / "1" / f"v{version}" / "manifest.json").read_text())
        return found

    def _spawn(self, module: str, *arguments: str, failpoint: str = "") -> subprocess.Popen[str]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ROLLSTREAM_FAILPOINT": failpoint}
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env=environment, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )


async def until_version(bus: Bus, version: int, timeout: float = 60.0) -> None:
    """Wait until v{version} is announced."""
    ends = time.monotonic() + timeout
    while await bus.weights.get(1, version) is None:
        assert time.monotonic() < ends, f"v{version} was not announced within {timeout} s"
        await asyncio.sleep(0.05)


def train_in_process(directory: Path, steps: int) -> str:
    """Content digest of the weights that :class:`Committer`'s first ``steps`` batches make, trained right here."""
    import torch

    from rollstream.core.config import ModelConfig
    from rollstream.trainer.model import Policy
    from rollstream.trainer.ranks import Ranks
    from rollstream.trainer.samples import TrainSample
    from rollstream.trainer.state import full_state
    from rollstream.trainer.step import TrainStep
    from rollstream.trainer.weights import digest_of

    config = TrainerConfig.model_validate(tiny_settings(directory))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        policy = Policy.load(ModelConfig(name=config.model.name))
        step = TrainStep(
            policy, Ranks.alone(), seq_len=config.seq_len, loss=config.loss, optim=config.optim,
            schedule=config.schedule, max_steps=config.max_steps,
        )
        for number in range(1, steps + 1):
            rollouts = [make_rollout(number, member) for member in range(MEMBERS)]
            samples = [
                TrainSample.from_wire(make_sample("s", "", rollout, member), rollout.branches[0])
                for member, rollout in enumerate(rollouts)
            ]
            step.fit(number, samples)
    finally:
        torch.set_num_threads(threads)
    scratch = directory / "scratch"
    scratch.mkdir()
    return digest_of(full_state(policy, sharded=False), scratch)
