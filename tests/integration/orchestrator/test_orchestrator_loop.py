"""The loop as processes: orchestrator, env workers, router and replica on real NATS and Redis."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.core.bus import Bus, Phase
from rollstream.core.run import RunDir
from rollstream.core.store import Store
from rollstream.core.wire import Batch, Group, Rollout
from support.independent_reader import audit_run
from support.loop_site import LoopSite
from support.until import until

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def site(tmp_path: Path, nats_server: Any, redis_server: Any) -> AsyncIterator[LoopSite]:
    run = RunDir.create(tmp_path / "run", name="loop")
    bus = await Bus.connect(nats_server.url, run.run_id, name="test", connect_timeout=10)
    await bus.create_streams()
    store = await Store.connect(redis_server.url, run.run_id, connect_timeout=10)
    yield LoopSite(run, bus, store, nats_server.url, redis_server.url)
    await store.close()
    await bus.close()


async def finished(process: asyncio.subprocess.Process, seconds: float = 120) -> int:
    return await asyncio.wait_for(process.wait(), seconds)


async def audited(site: LoopSite, steps: int) -> None:
    audit = await audit_run(site.nats_url, site.run.path, steps)
    assert audit.problems == []


def metrics(site: LoopSite) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (site.run.path / "metrics.jsonl").read_text().splitlines()]


async def committed(site: LoopSite) -> int:
    head = await site.bus.get(site.bus.subjects.commits)
    return head.record.step if head is not None and isinstance(head.record, Batch) else 0


async def test_a_run_from_start_to_done(site: LoopSite) -> None:
    site.settings = {"eval": [{"id": "toy-words", "num_tasks": 3, "rollouts_per_task": 2, "interval": 2}]}
    batches: list[Batch] = []
    async with site.serving(), site.worker("w0") as first, site.worker("w1") as second, site.orchestrator() as process:
        await asyncio.gather(site.train(4, on_batch=batches.append), finished(process))
        assert process.returncode == 0
        assert await finished(first, 15) == 0 and await finished(second, 15) == 0
        await until(lambda: no_sessions(site))
    assert (await site.bus.intent.get()).phase is Phase.DONE
    await audited(site, 4)
    assert [batch.step for batch in batches] == [1, 2, 3, 4]
    assert all(len({sample.subject.split(".")[4] for sample in batch.samples}) <= 2 for batch in batches)
    assert all("train/agg/effective/agent/reward/mean" in batch.metrics for batch in batches)
    assert all(batch.metrics["off_policy/max"] <= 8 for batch in batches)
    evals = [line for line in metrics(site) if "eval/toy-words/reward/mean" in line]
    assert (evals[0]["step"], evals[-1]["step"]) == (0, 4)
    traces = [json.loads(line) for line in (site.run.path / "rollouts/step_2/train.jsonl").read_text().splitlines()]
    assert len(traces) == 6 and {"messages", "reward", "advantage", "versions"} <= set(traces[0])
    assert len((site.run.path / "rollouts/step_4/eval.jsonl").read_text().splitlines()) == 6


async def no_sessions(site: LoopSite) -> bool:
    return sum((await site.store.sessions.loads()).values()) == 0


async def test_tokens_carry_the_version_that_sampled_them_and_stay_in_bounds(site: LoopSite) -> None:
    site.settings = {"max_steps": 6, "max_off_policy_steps": 2, "sampling": {"max_tokens": 12}}
    seen: list[tuple[int, Rollout]] = []
    async with site.serving(token_delay=0.01), site.worker(), site.orchestrator() as process:
        batches: list[Batch] = []
        await asyncio.gather(site.train(6, on_batch=batches.append), finished(process))
        for batch in batches:
            for sample in batch.samples:
                stored = await site.bus.get(sample.subject)
                assert stored is not None and stored.digest == sample.digest and isinstance(stored.record, Rollout)
                seen.append((batch.step, stored.record))
    for step, rollout in seen:
        for branch in rollout.branches:
            covered = sum(span.end - span.start for span in branch.spans)
            assert covered == branch.sampled.numpy().sum()
            assert all(0 <= step - 1 - span.version <= 2 for span in branch.spans)
    assert any(span.version > 0 for _, rollout in seen for branch in rollout.branches for span in branch.spans)


async def test_an_orchestrator_that_is_killed_is_replaced_without_losing_or_doubling(site: LoopSite) -> None:
    site.settings = {"max_steps": 6}
    async with site.serving(), site.worker():
        training = asyncio.create_task(site.train(6, seconds=0.1))
        async with site.orchestrator() as process:
            await until(lambda: at_step(site, 2), 120)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        async with site.orchestrator() as process:
            assert await finished(process) == 0
        await training
    await audited(site, 6)
    groups = await all_groups(site)
    assert len({group.group for group in groups}) == len(groups)
    assert [group.task for group in groups[:10]] == [group.task for group in sorted(groups, key=lambda g: g.group)[:10]]


async def at_step(site: LoopSite, step: int) -> bool:
    return await committed(site) >= step


async def all_groups(site: LoopSite) -> list[Group]:
    async with site.bus.read("GROUPS") as reader:
        found: list[Group] = []
        while batch := await reader.batch(256, 0.5):
            found += [stored.record for stored in batch if isinstance(stored.record, Group)]
    return found


@pytest.mark.parametrize(
    ("component", "failpoint"),
    [
        ("orchestrator", "after_epoch"),
        ("orchestrator", "after_group_before_episodes:3"),
        ("orchestrator", "after_commit_before_ack:2"),
        ("worker", "after_rollout_before_ack:4"),
    ],
)
async def test_dying_at_the_worst_moment_loses_and_doubles_nothing(
    site: LoopSite, tmp_path: Path, component: str, failpoint: str
) -> None:
    name, _, count = failpoint.partition(":")
    armed = f"{name}:{count or 1}:{tmp_path / 'died'}"
    async with site.serving():
        training = asyncio.create_task(site.train(4))
        if component == "worker":
            async with site.orchestrator() as process:
                async with site.worker("w0", failpoint=armed) as doomed:
                    assert await finished(doomed) == -signal.SIGKILL
                async with site.worker("w1"):
                    assert await finished(process) == 0
        else:
            async with site.worker():
                async with site.orchestrator(failpoint=armed) as doomed:
                    assert await finished(doomed) == -signal.SIGKILL
                async with site.orchestrator() as process:
                    assert await finished(process) == 0
        await training
    await audited(site, 4)


async def test_a_second_orchestrator_takes_over_and_the_first_one_leaves(site: LoopSite) -> None:
    site.settings = {"max_steps": 8}
    async with site.serving(), site.worker(), site.orchestrator() as first:
        await site.train(1)
        async with site.orchestrator() as second:
            await until(lambda: at_epoch(site, 2), 120)
            assert first.returncode is None, "it sleeps until the trainer comes along"
            training = asyncio.create_task(site.train(8))
            assert await finished(first) == 4
            assert await finished(second) == 0
        await training
    await audited(site, 8)


async def at_epoch(site: LoopSite, epoch: int) -> bool:
    return (await site.bus.chain()).head.epoch >= epoch


async def test_garbage_in_the_place_of_a_rollout_costs_one_member_and_is_reported(site: LoopSite) -> None:
    subject = site.bus.subjects.rollout("train", "t1-toy-words-000000", 1)
    await site.bus.js.publish(subject, b"\xc1 no rollout")
    async with site.serving(), site.worker(), site.orchestrator() as process:
        await asyncio.gather(site.train(4), finished(process))
        assert process.returncode == 0
    await audited(site, 4)
    async with site.bus.read("EVENTS", subject=site.bus.subjects.event("malformed_rollout")) as reader:
        stored = await reader.next(5)
    assert stored is not None and subject in stored.record.message  # type: ignore[union-attr]


async def test_a_run_in_which_every_episode_fails_ends_with_the_reason(site: LoopSite) -> None:
    site.settings = {"train": [{"id": "toy-words", "args": {"count": 1, "fail_on": "apple"}}]}
    async with site.serving(), site.worker(), site.orchestrator() as process:
        assert await finished(process) == 2
    intent = await site.bus.intent.get()
    assert intent.phase is Phase.FAILED and "no score for apple" in intent.reason


async def test_an_episode_that_brings_its_workers_down_is_given_up(site: LoopSite) -> None:
    site.settings = {"workers": {"concurrency": 16, "lease_seconds": 1.0, "max_deliveries": 1}}
    async with site.serving(token_delay=2.0), site.orchestrator():
        for name in ("w0", "w1"):
            async with site.worker(name) as worker:
                await until(lambda: some_inflight(site), 90)
                worker.send_signal(signal.SIGKILL)
                await worker.wait()
            await site.store.registry.drop("env-worker", name)
        async with site.worker("w2"), site.bus.read("ROLLOUTS") as reader:
            async with asyncio.timeout(30):
                while (stored := await reader.next(1.0)) is None:
                    pass
            rollout = stored.record
    assert isinstance(rollout, Rollout) and rollout.error is not None and rollout.error.kind == "TooManyDeliveries"


async def some_inflight(site: LoopSite) -> bool:
    return any(lease.inflight for lease in await site.store.registry.list("env-worker"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": []}, "needs a training source"),
        ({"train": [{"id": "no-such-taskset"}]}, "pip install"),
        ({"train": [{"id": "toy-words", "args": {"count": 0}}]}, "has no tasks"),
        ({"bus": {"url": "nats://127.0.0.1:1", "connect_timeout": 0.5}}, "nats://127.0.0.1:1 does not answer"),
    ],
)
async def test_bad_input_is_one_message_and_exit_code_2(
    site: LoopSite, capfd: pytest.CaptureFixture[str], settings: dict[str, Any], message: str
) -> None:
    async with site.orchestrator(**settings) as process:
        assert await finished(process) == 2
    output = capfd.readouterr().out
    assert message in output and "Traceback" not in output
    assert (await site.bus.intent.get()).phase is Phase.CREATED
