"""Episodes against a scripted engine over HTTP: exact tokens, retries, sessions, several turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from verifiers.v1.clients import ModelContext
from verifiers.v1.trace import Trace
from verifiers.v1.types import SamplingConfig

from rollstream.core.bus import Bus
from rollstream.core.config import TrainSourceConfig
from rollstream.core.wire import Episode, Rollout, Sampling
from rollstream.orchestrator.worker.environments import Tasks, load_environment
from rollstream.orchestrator.worker.episodes import EpisodePlayer
from rollstream.orchestrator.worker.interception import POLICY_ENDPOINT
from rollstream.orchestrator.worker.policy_client import PolicyClient
from rollstream.orchestrator.worker.rendering import Rendering
from rollstream.orchestrator.worker.routers import Routers
from rollstream.orchestrator.worker.trace_to_rollout import errored_rollout, rollout_of
from support.scripted_engine import Behaviour, ScriptedEngine
from support.tiny_model import make_tokenizer

TASKSETS = Path(__file__).parents[2] / "support" / "tasksets"


class FakeRouter:
    """A scripted engine with the router's release route, in this process; notes what it was asked."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine("m", "1:7", 16, 2048, Behaviour())
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.released: list[str] = []
        self.refuse: list[web.Response] = []

    async def generate(self, request: web.Request) -> web.Response:
        self.asked.append((dict(request.headers), await request.json()))
        return self.refuse.pop(0) if self.refuse else await self.engine.generate(request)

    async def finish(self, request: web.Request) -> web.Response:
        self.released.append(request.headers["X-Session-ID"])
        return web.json_response({})


@pytest.fixture
async def router() -> AsyncIterator[tuple[FakeRouter, str]]:
    fake = FakeRouter()
    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", fake.generate), web.post("/finish_session", fake.finish)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield fake, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def policy(router: tuple[FakeRouter, str], tmp_path: Path) -> AsyncIterator[PolicyClient]:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    async with aiohttp.ClientSession(trust_env=False) as http:
        yield PolicyClient(http, Routers([router[1]]), Rendering.load(str(tmp_path)), model="m", seq_len=256)


def episode(**changes: Any) -> Episode:
    fields: dict[str, Any] = {
        "group": "g", "member": 0, "kind": "train", "source": "s", "task": 0, "timeline": 1, "min_version": 6,
        "sampling": Sampling(temperature=0.7, max_tokens=6),
    }
    return Episode(**{**fields, **changes})


async def play(policy: PolicyClient, source: str, wanted: Episode, monkeypatch: pytest.MonkeyPatch) -> Rollout:
    monkeypatch.syspath_prepend(str(TASKSETS))
    environment = load_environment(TrainSourceConfig(id=source), policy)
    sessions: list[str] = []

    def minted(trace: Trace) -> None:
        policy.open(trace.id, wanted)
        sessions.append(trace.id)

    context = ModelContext(model="m", client=POLICY_ENDPOINT, sampling=SamplingConfig(temperature=0.7))
    try:
        async with environment.serving():
            task = Tasks(environment.taskset)[wanted.task]
            played = await environment.run_episode(task, context, on_trace=minted)
        return rollout_of(wanted, played, [policy.exchange(session) for session in sessions], "w", 0)
    finally:
        await asyncio.gather(*(policy.close_session(session) for session in sessions))


async def test_an_episode_carries_exact_tokens_and_asks_for_a_fresh_replica(
    router: tuple[FakeRouter, str], policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, _ = router
    rollout = await play(policy, "toy-words", episode(), monkeypatch)
    headers, body = fake.asked[0]
    assert headers["X-Min-Policy-Version"] == "1:6" and fake.released == [headers["X-Session-ID"]]
    assert body["sampling_params"]["temperature"] == 0.7 and body["sampling_params"]["max_tokens"] == 6
    (branch,) = rollout.branches
    tokens = branch.token_ids.numpy().tolist()
    assert tokens[: len(body["token_ids"])] == body["token_ids"]
    assert [(span.timeline, span.version) for span in branch.spans] == [(1, 7)]
    assert branch.sampled.numpy().tolist() == [index >= len(body["token_ids"]) for index in range(len(tokens))]
    assert (branch.logprobs.numpy()[len(body["token_ids"]) :] < 0).all() and branch.temperature == 0.7


async def test_faults_and_answers_without_evidence_are_asked_again(
    router: tuple[FakeRouter, str], policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, _ = router
    empty = {"choices": [{"token_ids": [1], "finish_reason": "stop", "weight_versions": []}]}
    fake.refuse = [web.Response(status=503), web.json_response(empty), web.Response(body=b"<html>")]
    rollout = await play(policy, "toy-words", episode(), monkeypatch)
    assert rollout.error is None and len(fake.asked) == 4
    assert len({json.dumps(body) for _, body in fake.asked}) == 1, "the same request each time"


async def test_a_refusal_that_will_not_change_fails_the_episode_at_once(
    router: tuple[FakeRouter, str], policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, _ = router
    fake.refuse = [web.Response(status=400, text="no such model")]
    rollout = await play(policy, "toy-words", episode(), monkeypatch)
    assert rollout.error is not None and "no such model" in rollout.error.message and len(fake.asked) == 1
    assert len(fake.released) == 1


async def test_a_prompt_that_fills_the_context_fails_without_a_request(
    router: tuple[FakeRouter, str], policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy._seq_len = 10
    rollout = await play(policy, "toy-words", episode(), monkeypatch)
    assert rollout.error is not None and "seq_len is 10" in rollout.error.message and router[0].asked == []


async def test_members_of_a_seeded_group_sample_different_tokens(
    router: tuple[FakeRouter, str], policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    for member in (0, 1):
        await play(policy, "toy-words", episode(member=member, sampling=Sampling(seed=3, max_tokens=6)), monkeypatch)
    first, second = (body["sampling_params"]["seed"] for _, body in router[0].asked)
    assert first != second


async def test_a_harness_of_the_tasksets_own_reaches_the_policy_over_http(
    router: tuple[FakeRouter, str], policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, _ = router
    rollout = await play(policy, "toy-dialogue", episode(), monkeypatch)
    assert rollout.error is None and rollout.reward == 2.0 and rollout.turns == 2
    sampled = sum(int(branch.sampled.numpy().sum()) for branch in rollout.branches)
    spans = sum(span.end - span.start for branch in rollout.branches for span in branch.spans)
    assert sampled == spans > 0
    sessions = {headers["X-Session-ID"] for headers, _ in fake.asked}
    assert len(sessions) == 1 and fake.released == list(sessions)
    last = rollout.branches[-1].token_ids.numpy().tolist()
    assert last[: len(fake.asked[1][1]["token_ids"])] == fake.asked[1][1]["token_ids"], "tokens in are tokens trained"


class Talkative(EpisodePlayer):
    """Plays episodes whose messages alone exceed what one record may hold."""

    async def play(self, episode: Episode) -> Rollout:
        rollout = errored_rollout(episode, "w", "none", "", 1)
        return msgspec.structs.replace(rollout, error=None, messages=({"role": "user", "content": "x" * 600_000},))


async def test_an_episode_whose_record_is_too_large_fails_and_its_worker_goes_on(
    bus: Bus, policy: PolicyClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(TASKSETS))
    environment = load_environment(TrainSourceConfig(id="toy-words"), policy)
    player = Talkative(bus, environment, policy, model="m", worker="w", max_deliveries=3, timeout=10)
    wanted = episode()
    await bus.put_once(bus.subjects.episode("s", "g", 0), wanted)
    queue = bus.episodes("s", lease_seconds=5)
    [lease] = await queue.pull(1, 5)
    rollout = await player.handle(lease)
    assert rollout is not None and rollout.error is not None
    assert rollout.error.kind == "RecordTooLarge"
    stored = await bus.get(bus.subjects.rollout("train", "g", 0))
    assert stored is not None and stored.record == rollout
    assert await queue.pull(1, 0.5) == []
    await queue.close()
