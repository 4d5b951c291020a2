"""A taskset with a harness of its own: two chat turns over HTTP, as an agent program would take them."""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.runtimes import ProgramResult, Runtime


class TalkTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class TalkTaskset(vf.Taskset[TalkTask, vf.TasksetConfig]):
    def load(self) -> Iterable[TalkTask]:
        yield TalkTask(vf.TaskData(prompt="Hello"), self.config.task)


class TalkHarnessConfig(vf.HarnessConfig):
    pass


class TalkHarness(vf.Harness[TalkHarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        headers = {"Authorization": f"Bearer {secret}"}
        async with aiohttp.ClientSession(trust_env=False, headers=headers) as http:
            for _ in range(2):
                body = {"model": ctx.model, "messages": messages}
                async with http.post(f"{endpoint}/chat/completions", json=body) as answer:
                    if answer.status != 200:
                        return ProgramResult(1, "", await answer.text())
                    message = (await answer.json())["choices"][0]["message"]
                messages += [message, {"role": "user", "content": "More"}]
        return ProgramResult(0, "", "")


__all__ = ["TalkHarness", "TalkTaskset"]
