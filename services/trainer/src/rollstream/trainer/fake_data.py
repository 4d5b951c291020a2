"""Train on made-up batches: the trainer alone, for benchmarks and cheap tests. No bus, no store."""

from __future__ import annotations

import time

import numpy as np
import structlog

from rollstream.core.config import FakeDataConfig, TrainerConfig
from rollstream.core.run import RunDir
from rollstream.core.telemetry import MonitorGroup
from rollstream.trainer import determinism
from rollstream.trainer.engine import Engine, Position
from rollstream.trainer.measure import StepTimes, step_metrics
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.samples import TrainSample

_log = structlog.get_logger(__name__)


def fake_batch(config: FakeDataConfig, step: int, vocab: int) -> list[TrainSample]:
    """The samples of ``step``: seeded, so equal on every rank and in every run."""
    generator = np.random.default_rng((config.seed, step))
    length = config.prompt_tokens + config.completion_tokens
    sampled = np.arange(length) >= config.prompt_tokens
    zeros, ones = np.zeros(length, np.float32), np.ones(length, np.float32)
    return [
        TrainSample(
            name=f"fake-{step}-{index}",
            token_ids=generator.integers(0, vocab, length),
            sampled=sampled,
            logprobs=np.where(sampled, np.float32(-np.log(vocab)), np.float32(0)),
            advantages=np.where(sampled, np.float32(generator.normal()), np.float32(0)),
            rl_weights=ones, ce_weights=zeros, ref_kl_weights=zeros, ref_logprobs=zeros, temperature=1.0,
        )
        for index in range(config.batch_size)
    ]


def train_on_fake_data(config: TrainerConfig, *, deterministic: bool) -> int:
    """``max_steps`` steps on every rank; metrics and a final checkpoint (if on) go to the run directory. Returns 0."""
    assert config.fake_data is not None
    determinism.prepare(deterministic=deterministic, threads=config.threads, seed=config.seed)
    ranks = Ranks.join(config.dist_timeout)
    run = _run_dir(config, ranks)
    engine = Engine(config, ranks, run, None)
    monitors = MonitorGroup.from_config(
        config.monitors, metrics_path=run.metrics, run_name=run.name, run_id=run.run_id, component="trainer",
        primary=True,
    ) if ranks.is_lead else MonitorGroup({})
    for step in range(1, config.max_steps + 1):
        begun = time.monotonic()
        samples = fake_batch(config.fake_data, step, engine.policy.shape.vocab)
        made = time.monotonic()
        bins = engine.bins([len(sample) for sample in samples])
        result = engine.train(step, bins, dict(enumerate(samples)))
        times = StepTimes(0.0, made - begun, time.monotonic() - made, 0.0)
        monitors.log(step, step_metrics(result, times, {}))
        if ranks.is_lead:
            speed = round(result.tokens / times.busy)
            _log.info("step", step=step, loss=round(result.loss, 6), seconds=round(times.busy, 3), tokens_per_s=speed)
    if config.ckpt is not None:
        engine.save_checkpoint(Position(config.max_steps, 1), "", b"")
    monitors.close()
    ranks.leave()
    return 0


def _run_dir(config: TrainerConfig, ranks: Ranks) -> RunDir:
    """The run directory, made by rank 0 when it is new."""
    if ranks.is_lead and not (config.run_dir / "run.json").exists():
        RunDir.create(config.run_dir, name="fake-data")
    ranks.barrier()
    return RunDir.open(config.run_dir)
