"""``rollstream replay RUN``: rebuild the final weights from v0 and the archive of the chain, in a fresh process.

Needs nothing of the run but ``weights/<timeline>/v0``, ``batches/`` and the trainer's resolved configuration. With the
world size, threads and library versions of the first run (recorded beside v0) the result is equal bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from rollstream.core.bus.blobs import map_arrays
from rollstream.core.config import LogConfig, TrainerConfig
from rollstream.core.errors import RollstreamError, UsageError, run_main
from rollstream.core.run import ArchiveDamaged, BatchArchive, RunDir, archived_steps, read_archive
from rollstream.core.telemetry import configure_logging
from rollstream.core.wire import Array, Batch, Record
from rollstream.trainer import determinism
from rollstream.trainer.model import Policy
from rollstream.trainer.packing import Bin
from rollstream.trainer.ranks import Ranks
from rollstream.trainer.rollouts import join, lengths, open_rollout
from rollstream.trainer.samples import TrainSample
from rollstream.trainer.state import full_state, load_full_state
from rollstream.trainer.step import TrainStep
from rollstream.trainer.weights import digest_of, read_environment, read_version, save_version

RecordT = TypeVar("RecordT", bound=Record)


class Diverged(RollstreamError):
    """The replay made other weights than were announced; the message names the step."""


@dataclass(frozen=True)
class Arguments:
    """The command line."""

    run: Path
    verify: bool
    config: Path | None
    until: int | None
    out: Path | None
    as_rank: bool


def parse(argv: list[str]) -> Arguments:
    """The command line as :class:`Arguments`; argparse prints help and usage errors itself (exit code 2)."""
    parser = argparse.ArgumentParser(prog="rollstream replay", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--verify", action="store_true", help="compare every step, name the first that differs")
    parser.add_argument("--config", type=Path, help="trainer configuration (JSON); the run's latest when not given")
    parser.add_argument("--until", type=int, help="stop after this step")
    parser.add_argument("--out", type=Path, help="directory for the rebuilt weights")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return Arguments(**vars(parser.parse_args(argv)))


class Replay:
    """One rank of a replay: :meth:`run` once. With a world above 1 all ranks do the same in step."""

    def __init__(self, arguments: Arguments, run: RunDir, config: TrainerConfig, ranks: Ranks) -> None:
        self._arguments = arguments
        self._run = run
        self._ranks = ranks
        base = run.version(run.timeline, 0)
        self._policy = Policy.empty(config.model, base)
        load_full_state(self._policy, read_version(base), sharded=False)
        self._policy = self._policy.to(ranks.device).shard(ranks)
        self._step = TrainStep(
            self._policy, ranks, seq_len=config.seq_len, loss=config.loss, optim=config.optim,
            schedule=config.schedule, max_steps=config.max_steps,
        )

    def run(self) -> str:
        """Replay every archived step; the content digest of the final weights (on rank 0)."""
        last, digest = 0, ""
        steps = steps_to_replay(self._run, self._arguments.until)
        for step in steps:
            archive = read_archive(self._run.batch(step))
            archive.verify()
            self._train(archive)
            if self._arguments.verify or step == steps[-1]:
                digest = self._compare(archive)
            last = step
        self._report(f"replayed {last} steps: v{last} has digest {digest}, as announced")
        if self._arguments.out is not None:
            state = full_state(self._policy, sharded=self._ranks.world > 1)
            if self._ranks.is_lead:
                save_version(self._arguments.out, self._run.timeline, last, state, self._policy.hf.config)
                self._report(f"weights written to {self._arguments.out}")
        return digest

    def _train(self, archive: BatchArchive) -> None:
        batch = _filled(archive.batch(), archive.blobs)
        bins = self._step.mine(lengths(batch))
        self._step.run(batch.step, bins, _samples(archive, batch, bins))

    def _compare(self, archive: BatchArchive) -> str:
        state = full_state(self._policy, sharded=self._ranks.world > 1)
        if not self._ranks.is_lead:
            return ""
        with tempfile.TemporaryDirectory() as scratch:
            made = digest_of(state, Path(scratch))
        announced = archive.weight_notice().digest
        if made != announced:
            raise Diverged(
                f"step {archive.step} diverges: the replay made v{archive.step} with digest {made[:16]}, "
                f"{announced[:16]} was announced",
                hint="equal bits need the world size, threads, CPU and library versions of the first run",
            )
        if self._arguments.verify:
            self._report(f"step {archive.step}: equal")
        return made

    def _report(self, line: str) -> None:
        if self._ranks.is_lead:
            print(line, flush=True)


def steps_to_replay(run: RunDir, until: int | None) -> list[int]:
    """Steps to replay, 1 … n; raises :class:`ArchiveDamaged` naming a gap."""
    steps = [step for step in archived_steps(run.batches) if until is None or step <= until]
    if not steps:
        raise UsageError(f"{run.batches} holds no archived batch", hint="a checkpoint archives what it covers")
    for expected, step in enumerate(steps, start=1):
        if step != expected:
            raise ArchiveDamaged(f"step {expected}: {run.batch(expected)} is missing", hint="restore it from a backup")
    return steps


def _samples(archive: BatchArchive, batch: Batch, bins: list[Bin]) -> dict[int, TrainSample]:
    rollouts = {
        sample.subject: _filled(
            open_rollout(sample.subject, archive.rollouts[sample.subject], sample.digest, batch.step), archive.blobs
        )
        for sample in batch.samples
    }
    wanted = sorted(index for entry in bins for index in entry.samples)
    return {index: join(batch.step, batch.samples[index], rollouts[batch.samples[index].subject]) for index in wanted}


def _filled(record: RecordT, blobs: dict[str, bytes]) -> RecordT:
    """``record`` with its spilled arrays filled in from the archive."""

    def fill(array: Array) -> Array:
        return array if array.blob is None else Array(dtype=array.dtype, shape=array.shape, data=blobs[array.blob])

    filled: RecordT = map_arrays(record, fill)
    return filled


def load_trainer_config(run: RunDir, path: Path | None) -> TrainerConfig:
    """The configuration that the run was trained with; raises ``UsageError``."""
    path = path or run.path / "configs" / "latest" / "resolved" / "trainer.json"
    try:
        return TrainerConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="name another with --config") from error
    except ValidationError as error:
        raise UsageError(f"{path} is no trainer configuration: {error}") from error


def replay(arguments: Arguments, argv: list[str]) -> int:
    """Replay in this process, or start the ranks that the first run had."""
    run = RunDir.open(arguments.run)
    config = load_trainer_config(run, arguments.config)
    environment = read_environment(run.version(run.timeline, 0))
    _warn_of_differences(environment)
    world = int(environment["world"])
    if world > 1 and not arguments.as_rank:
        from rollstream.trainer.launch import launch_ranks

        return launch_ranks("rollstream.trainer.replay", [*argv, "--as-rank"], world)
    determinism.prepare(deterministic=True, threads=int(environment["threads"]), seed=config.seed)
    ranks = Ranks.join(config.dist_timeout) if world > 1 else Ranks.alone()
    Replay(arguments, run, config, ranks).run()
    ranks.leave()
    return 0


def _warn_of_differences(recorded: dict[str, str | int]) -> None:
    here = determinism.environment()
    for name in ("torch", "device"):
        if recorded.get(name) != here[name]:
            print(f"warning: the run had {name} {recorded.get(name)}, here it is {here[name]}", file=sys.stderr)


def main() -> int:
    """``rollstream replay RUN [--verify]``; returns the exit code."""
    argv = sys.argv[1:]
    configure_logging(LogConfig(level="warning"), "replay")
    return run_main(lambda: replay(parse(argv), argv))


if __name__ == "__main__":
    sys.exit(main())
