"""Real vLLM on a CPU behind our server: one engine for the whole file, so the tests build on one another's versions."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstream.core.config import InferenceConfig, ModelConfig
from rollstream.inference.client import EngineClient, EngineRefused
from rollstream.inference.engine import EngineProcess
from support.tiny_model import make_tiny_model
from support.weight_versions import write_version

pytestmark = pytest.mark.engine

TEMPERATURE = 0.7
TOKEN = "secret"


@dataclass
class Served:
    """The engine under test, and the model whose weights it should hold."""

    engine: EngineProcess
    model_dir: Path
    run_dir: Path
    model: Any
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def publish(self, *, flip: bool = False) -> tuple[Path, int, str]:
        """Perturb the model and write it as the next version (directory, version, digest)."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        # As the trainer writes it: a tied lm_head is not in the file.
        tensors = {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"}
        version = next(self.versions)
        notice = write_version(self.run_dir, 1, version, save(tensors), flip=flip)
        return self.run_dir / notice.location, version, notice.digest

    async def load(self, published: tuple[Path, int, str]) -> str:
        """Load a published version and return its label."""
        directory, version, digest = published
        client = EngineClient(self.engine.url, TOKEN)
        try:
            await client.load(directory, 1, version, digest, timeout=30)
        finally:
            await client.close()
        return f"1:{version}"

    def reference(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """The trainer's logprobs f32 [len(tokens)] of ``tokens`` after ``prompt`` at :data:`TEMPERATURE`."""
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0].float()
        logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
        positions = torch.arange(len(prompt) - 1, len(prompt) + len(tokens) - 1)
        return logprobs[positions, torch.tensor(tokens)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.set_num_threads(1)
    run_dir = tmp_path_factory.mktemp("run")
    model_dir = make_tiny_model(run_dir / "model", layers=3, hidden=64)
    config = InferenceConfig(model=ModelConfig(name=str(model_dir)), vllm={"max_num_seqs": 64})
    engine = EngineProcess(config, run_dir / "engine.log", TOKEN, cpu=True)
    with asyncio.Runner() as runner:
        client = runner.run(engine.start("1:0"))
        runner.run(client.close())
        try:
            yield Served(engine, model_dir, run_dir, AutoModelForCausalLM.from_pretrained(model_dir))
        finally:
            runner.run(engine.stop())


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(trust_env=False, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def generate(http: aiohttp.ClientSession, served: Served, prompt: list[int], max_tokens: int, **more: Any) -> Any:
    params = {"temperature": TEMPERATURE, "max_tokens": max_tokens, "logprobs": 1, "ignore_eos": True}
    body = {"token_ids": prompt, "sampling_params": params, **more}
    async with http.post(f"{served.engine.url}/inference/v1/generate", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]


def logprobs_of(choice: Any) -> torch.Tensor:
    return torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])


async def assert_serves(http: aiohttp.ClientSession, served: Served, label: str) -> None:
    """The engine's logprobs are those of ``served.model``, and it says so."""
    prompt = [5, 6, 7, 8]
    choice = await generate(http, served, prompt, 60)
    difference = (served.reference(prompt, choice["token_ids"]) - logprobs_of(choice)).abs()
    assert difference.mean() < 1e-5, f"mean {difference.mean():.1e}, max {difference.max():.1e}"
    assert choice["weight_versions"] == [{"version": label, "start": 0, "end": 60}]


async def test_logprobs_equal_the_trainers_before_and_after_updates(
    http: aiohttp.ClientSession, served: Served
) -> None:
    await assert_serves(http, served, "1:0")
    for _ in range(2):
        await assert_serves(http, served, await served.load(served.publish()))


async def test_a_request_in_flight_goes_on_and_its_spans_mark_the_switch(
    http: aiohttp.ClientSession, served: Served
) -> None:
    switched = 0
    for _ in range(10):  # until an update really falls into a request
        published = served.publish()
        before = f"1:{published[1] - 1}"
        requests = [asyncio.create_task(generate(http, served, [5, 6, 7], 500)) for _ in range(8)]
        await asyncio.sleep(0.15)
        after = await served.load(published)
        for choice in await asyncio.gather(*requests):
            spans = choice["weight_versions"]
            assert len(choice["token_ids"]) == 500
            assert [spans[0]["start"], spans[-1]["end"]] == [0, 500]
            if len(spans) == 2:
                switched += 1
                assert [span["version"] for span in spans] == [before, after]
                assert 0 < spans[0]["end"] == spans[1]["start"] < 500
            else:
                assert [span["version"] for span in spans] in ([before], [after])
        if switched:
            return
    pytest.fail("no update fell into a request in ten attempts")


async def test_a_prompt_cached_before_an_update_is_not_used_after(http: aiohttp.ClientSession, served: Served) -> None:
    prompt = [int(token) for token in torch.randint(4, 100, (300,))]  # spans whole KV blocks
    for _ in range(3):
        choice = await generate(http, served, prompt, 4)
        difference = (served.reference(prompt, choice["token_ids"]) - logprobs_of(choice)).abs()
        assert difference.mean() < 1e-5
        await served.load(served.publish())


async def test_a_damaged_version_names_the_file_and_the_old_one_serves_on(
    http: aiohttp.ClientSession, served: Served
) -> None:
    label = await served.load(served.publish())
    whole = {name: value.clone() for name, value in served.model.state_dict().items()}
    damaged = served.publish(flip=True)
    with pytest.raises(EngineRefused, match=r"v\d+/model\.safetensors: its sha256 is not the one") as refusal:
        await served.load(damaged)
    assert not refusal.value.fatal
    with pytest.raises(EngineRefused, match="was announced"):
        await served.load((damaged[0], damaged[1], "0" * 64))
    served.model.load_state_dict(whole)
    await assert_serves(http, served, label)
    await assert_serves(http, served, await served.load(served.publish()))


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}], ids=["own route", "stock route"])
async def test_the_answer_carries_both_spellings_of_a_token(
    http: aiohttp.ClientSession, served: Served, more: dict[str, Any]
) -> None:
    choice = await generate(http, served, [5, 6], 5, **more)
    for token_id, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
        assert entry["token"] == f"token_id:{token_id}"
        assert entry["token_id"] == token_id


async def test_the_stock_renderers_client_accepts_it(served: Served) -> None:
    import openai
    import renderers

    tokenizer = AutoTokenizer.from_pretrained(served.model_dir)
    renderer = renderers.create_renderer(tokenizer)
    async with openai.AsyncOpenAI(base_url=f"{served.engine.url}/v1", api_key="none") as client:
        from renderers.client import generate as stock_generate

        answer = await stock_generate(
            client=client, renderer=renderer, messages=[{"role": "user", "content": "abc"}],
            model=str(served.model_dir), sampling_params={"max_tokens": 6, "temperature": 1.0},
        )
    assert 0 < len(answer["completion_ids"]) <= 6
    assert len(answer["completion_logprobs"]) == len(answer["completion_ids"])


async def test_openai_routes_are_there_and_salted_alike(http: aiohttp.ClientSession, served: Served) -> None:
    body = {"model": str(served.model_dir), "messages": [{"role": "user", "content": "abc"}], "max_tokens": 3}
    async with http.post(f"{served.engine.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["usage"]["completion_tokens"] <= 3


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"token_ids": [5], "sampling_params": {"temperature": -1}}, 400),
        ({"token_ids": [5], "sampling_params": {"no_such": 1}}, 400),
        ({"token_ids": [5] * 600, "sampling_params": {"max_tokens": 4}}, 400),
        ({"token_ids": [], "sampling_params": {"max_tokens": 4}}, 400),
        ({"token_ids": [5], "sampling_params": {}, "model": "another"}, 404),
        ({"token_ids": "abc", "sampling_params": {}}, 400),
    ],
)
async def test_bad_requests_are_refused_with_a_message(
    http: aiohttp.ClientSession, served: Served, body: Any, status: int
) -> None:
    async with http.post(f"{served.engine.url}/inference/v1/generate", json=body) as response:
        assert response.status == status, await response.text()
        assert (await response.json())["error"]["message"]


async def test_loading_wants_the_agents_token(http: aiohttp.ClientSession, served: Served) -> None:
    order = {"directory": "/", "timeline": 1, "version": 9}
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        async with http.post(f"{served.engine.url}/rollstream/load", json=order, headers=headers) as response:
            assert response.status == 403


async def test_a_client_that_leaves_frees_its_request(served: Served) -> None:
    client = EngineClient(served.engine.url, TOKEN)
    try:
        async with aiohttp.ClientSession() as leaving:
            task = asyncio.create_task(generate(leaving, served, [5], 500))
            await asyncio.sleep(0.2)
            assert (await client.status(5))["in_flight"] == 1
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        deadline = time.monotonic() + 5
        while (await client.status(5))["in_flight"]:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    finally:
        await client.close()


async def test_a_killed_server_leaves_no_orphan(served: Served) -> None:
    """The last test of the file: it ends the engine."""
    pid = served.engine.pid
    assert pid is not None
    family = psutil.Process(pid).children(recursive=True)
    assert any("EngineCore" in process.name() for process in family), family
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while alive := [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, alive
        await asyncio.sleep(0.1)
