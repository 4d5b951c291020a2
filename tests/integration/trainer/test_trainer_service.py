"""The trainer as a process on real NATS and Redis: follows the chain, announces, archives, survives being killed."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from rollstream.cli.servers import EmbeddedNats, EmbeddedRedis
from rollstream.core.bus import Bus, Phase
from rollstream.core.store import Store
from support.independent_reader import audit_run
from support.trainer_run import Committer, TrainerRun, train_in_process, until_version

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def trainer(
    tmp_path: Path, nats_server: EmbeddedNats, redis_server: EmbeddedRedis
) -> AsyncIterator[TrainerRun]:
    run = TrainerRun.create(tmp_path, nats_server.url, redis_server.url)
    yield run
    run.stop()


@pytest.fixture
async def committer(trainer: TrainerRun) -> AsyncIterator[Committer]:
    bus = await Bus.connect(trainer.nats, trainer.run_id, name="test", connect_timeout=10)
    yield await Committer.open(bus)
    await bus.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Digest of v4 when the same four batches are trained in this process, without bus, crash or checkpoint."""
    return train_in_process(tmp_path_factory.mktemp("undisturbed"), steps=4)


async def end_run(committer: Committer) -> None:
    await committer.bus.intent.set_phase(Phase.DRAINING, epoch=committer.chain.head.epoch)


async def finished(trainer: TrainerRun, timeout: float = 120.0) -> str:
    code, output = await asyncio.to_thread(trainer.finish, timeout)
    assert code == 0, output
    return output


async def audited(trainer: TrainerRun, steps: int) -> None:
    audit = await audit_run(trainer.nats, trainer.path, steps)
    assert audit.problems == []


async def test_a_run_from_v0_to_the_archive(trainer: TrainerRun, committer: Committer) -> None:
    trainer.start()
    for _ in range(4):
        await committer.commit()
    await until_version(committer.bus, 4)
    store = await Store.connect(trainer.redis, trainer.run_id)
    leases = await store.registry.list("trainer")
    assert [(lease.state, lease.metrics.startswith("http://")) for lease in leases] == [("ready", True)]
    await end_run(committer)
    await finished(trainer)
    assert await store.registry.list("trainer") == []
    await store.close()
    await audited(trainer, 4)
    rows = trainer.metrics()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for name in (
        "loss/mean", "mismatch_kl/all/mean", "entropy/all/mean", "optim/grad_norm", "optim/lr", "off_policy/mean",
        "perf/throughput", "time/step", "time/wait_for_batch", "train/agg/effective/agent/reward/mean",
    ):
        assert all(isinstance(row[name], float) for row in rows), name
    assert sorted(path.name for path in (trainer.path / "batches").iterdir()) == [
        f"step_{step}.msgpack" for step in (1, 2, 3, 4)
    ]
    assert sorted(path.name for path in (trainer.path / "checkpoints").iterdir()) == ["step_2", "step_4"]
    assert sorted(path.name for path in (trainer.path / "weights" / "1").iterdir()) == ["v0", "v1", "v2", "v3", "v4"]
    # Only the head's commit and nothing it has decided is left on the bus.
    assert await committer.bus.first_sequence("COMMITS") == committer.chain.head.seq
    assert await committer.bus.first_sequence("ROLLOUTS") == await committer.bus.last_sequence("ROLLOUTS") + 1


async def test_replay_rebuilds_the_weights_and_names_a_damaged_step(trainer: TrainerRun, committer: Committer) -> None:
    trainer.start(max_steps=3)
    await committer.commit(long=True)
    await committer.commit()
    await committer.commit(members=1)
    await end_run(committer)
    await finished(trainer)
    expected = trainer.manifest(3)["digest"]
    shutil.rmtree(trainer.path / "checkpoints")
    for version in (1, 2, 3):
        shutil.rmtree(trainer.path / "weights" / "1" / f"v{version}")
    code, output = await asyncio.to_thread(trainer.replay, "--verify", "--out", str(trainer.path / "rebuilt"))
    assert code == 0, output
    assert "step 3: equal" in output and expected in output
    assert expected in (trainer.path / "rebuilt" / "manifest.json").read_text()
    archive = trainer.path / "batches" / "step_2.msgpack"
    data = bytearray(archive.read_bytes())
    data[len(data) // 2] ^= 1
    archive.write_bytes(bytes(data))
    code, output = await asyncio.to_thread(trainer.replay, "--verify")
    assert code == 1 and "step 2" in output and "step 1: equal" in output, output


@pytest.mark.parametrize(
    "failpoint",
    [
        "after_weights_before_notice:1", "after_weights_before_notice:3", "after_notice:4", "mid_checkpoint:1",
        "after_checkpoint_before_archive:1", "between_purges:1",
    ],
)
async def test_killed_anywhere_the_run_completes_with_the_same_weights(
    trainer: TrainerRun, committer: Committer, undisturbed: str, failpoint: str
) -> None:
    for _ in range(4):
        await committer.commit()
    await end_run(committer)
    trainer.start(failpoint=failpoint)
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == -signal.SIGKILL, output
    trainer.start()
    await finished(trainer)
    await audited(trainer, 4)
    assert trainer.manifest(4)["digest"] == undisturbed
    steps = [row["step"] for row in trainer.metrics()]
    assert sorted(set(steps)) == [1, 2, 3, 4] and len(steps) <= 5


async def test_a_replay_that_diverges_from_what_was_announced_stops(
    trainer: TrainerRun, committer: Committer
) -> None:
    for _ in range(3):
        await committer.commit()
    trainer.start(failpoint="after_notice:3")  # v0, v1 and v2 are out
    assert (await asyncio.to_thread(trainer.finish))[0] == -signal.SIGKILL
    trainer.start(optim={"lr": 5e-3})
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == 2 and "v1 of timeline 1 was announced with digest" in output, output
    assert "Traceback" not in output


async def test_a_batch_that_is_not_finite_is_never_published(trainer: TrainerRun, committer: Committer) -> None:
    await committer.commit()
    bad = await committer.commit(poison=3e38)
    trainer.start()
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == 2 and "step 2" in output and bad.samples[0].subject in output, output
    assert await committer.bus.weights.get(1, 2) is None
    assert await committer.bus.weights.get(1, 1) is not None


async def test_a_malformed_record_on_the_chain_is_named(trainer: TrainerRun, committer: Committer) -> None:
    await committer.commit()
    await committer.bus.js.publish(committer.bus.subjects.commits, b"\x93no")
    trainer.start()
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == 2 and "sequence 3" in output and "Traceback" not in output, output


async def test_sigterm_saves_and_the_next_life_goes_on(trainer: TrainerRun, committer: Committer) -> None:
    process = trainer.start(ckpt={"interval": 50})
    await committer.commit()
    await until_version(committer.bus, 1)
    process.send_signal(signal.SIGTERM)
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == 128 + signal.SIGTERM, output
    assert (trainer.path / "checkpoints" / "step_1" / "manifest.json").exists()
    trainer.start()
    for _ in range(3):
        await committer.commit()
    await end_run(committer)
    output = await finished(trainer)
    assert "resuming from a checkpoint" in output
    await audited(trainer, 4)


async def test_a_checkpoint_can_be_asked_for(trainer: TrainerRun, committer: Committer) -> None:
    trainer.start(ckpt={"interval": 50}, max_steps=2)
    await committer.commit()
    await until_version(committer.bus, 1)
    await committer.bus.commands.request("trainer", "checkpoint", {})
    manifest = trainer.path / "checkpoints" / "step_1" / "manifest.json"
    for _ in range(100):
        if manifest.exists():
            break
        await asyncio.sleep(0.1)
    assert manifest.exists()
    await committer.commit()
    await end_run(committer)
    await finished(trainer)


async def test_without_checkpoints_the_chain_is_archived_at_the_end(trainer: TrainerRun, committer: Committer) -> None:
    for _ in range(2):
        await committer.commit()
    await end_run(committer)
    trainer.start(ckpt=None, max_steps=2)
    await finished(trainer)
    assert not (trainer.path / "checkpoints").exists()
    await audited(trainer, 2)
    assert await committer.bus.first_sequence("COMMITS") == 1


async def test_nats_away_for_a_while_costs_nothing(
    trainer: TrainerRun, committer: Committer, nats_server: EmbeddedNats
) -> None:
    trainer.start(max_steps=3)
    await committer.commit()
    await until_version(committer.bus, 1)
    nats_server.kill()
    await asyncio.sleep(1.0)
    nats_server.start()
    for _ in range(2):
        await committer.commit()
    await end_run(committer)
    await finished(trainer)
    await audited(trainer, 3)


async def test_a_wiped_store_is_filled_again(
    trainer: TrainerRun, committer: Committer, redis_server: EmbeddedRedis
) -> None:
    trainer.start(max_steps=2)
    await committer.commit()
    await until_version(committer.bus, 1)
    store = await Store.connect(trainer.redis, trainer.run_id)
    await store.redis.flushall()
    for _ in range(60):
        if await store.registry.list("trainer"):
            break
        await asyncio.sleep(0.1)
    assert await store.registry.list("trainer")
    waits = {entry.component: entry.detail for entry in await store.progress.list()}
    assert waits["trainer"] == "batch 2"
    await store.close()
    await committer.commit()
    await end_run(committer)
    await finished(trainer)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": {"name": "/nowhere/model"}}, "/nowhere/model"),
        ({"bus": {"url": "nats://127.0.0.1:1", "connect_timeout": 0.5}}, "nats://127.0.0.1:1"),
        ({"store": {"url": "redis://127.0.0.1:1/0", "connect_timeout": 0.5}}, "127.0.0.1:1"),
        ({"run_dir": "/nowhere/run"}, "/nowhere/run"),
    ],
)
async def test_bad_input_is_one_message_and_exit_code_2(
    trainer: TrainerRun, settings: dict[str, object], message: str
) -> None:
    trainer.start(**settings)
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == 2 and message in output and "Traceback" not in output, output
    assert len(output.splitlines()) <= 4, output


async def test_signals_reach_both_ranks_and_no_rank_outlives_its_launcher(
    trainer: TrainerRun, committer: Committer
) -> None:
    process = trainer.start(nproc=2, ckpt={"interval": 50})
    await committer.commit()
    await until_version(committer.bus, 1, 120)
    process.send_signal(signal.SIGTERM)
    code, output = await asyncio.to_thread(trainer.finish)
    assert code == 128 + signal.SIGTERM, output
    assert (trainer.path / "checkpoints" / "step_1" / "manifest.json").exists()
    process = trainer.start(nproc=2)
    await committer.commit()
    await until_version(committer.bus, 2, 120)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.kill()
    _, alive = await asyncio.to_thread(psutil.wait_procs, ranks, 10)
    assert alive == []


async def test_fake_data_needs_no_servers(trainer: TrainerRun, tmp_path: Path) -> None:
    fake = {"bus": {}, "store": {}, "fake_data": {"batch_size": 6}, "max_steps": 3}
    losses = []
    for nproc in (1, 2):
        path = tmp_path / f"fake{nproc}"
        trainer.start(**{**fake, "nproc": nproc, "run_dir": str(path)})
        await finished(trainer, 120)
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3]
        assert (path / "checkpoints" / "step_3" / "manifest.json").exists()
        losses.append([row["loss/mean"] for row in rows])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


async def test_two_ranks_follow_the_chain(trainer: TrainerRun, committer: Committer) -> None:
    trainer.start(nproc=2, max_steps=3, ckpt={"interval": 2})
    for _ in range(3):
        await committer.commit(members=5)
    await end_run(committer)
    await finished(trainer, 120)
    await audited(trainer, 3)
    code, output = await asyncio.to_thread(trainer.replay, "--verify", timeout=120)
    assert code == 0 and trainer.manifest(3)["digest"] in output, output
