"""How a harness reaches the policy: verifiers' interception server, and a way into it without HTTP."""

from __future__ import annotations

import time
from collections.abc import Collection

from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.interception import InterceptionServer
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Error, ModelCall, TimeSpan, Trace
from verifiers.v1.types import Messages, Request, Response, SystemMessage, UserMessage

from rollstream.orchestrator.worker.first_turn import commit_first_turn
from rollstream.orchestrator.worker.policy_client import PolicyClient

POLICY_ENDPOINT = TrainClientConfig(base_url="http://policy.invalid", api_key_var="ROLLSTREAM_NO_KEY")
"""Stands for the policy in verifiers' configuration; requests of it never leave through verifiers' own client."""

_CHAT = ChatDialect()


class PolicyInterception(InterceptionServer):
    """Hands every session whose endpoint is the policy to our client; other endpoints (judges) stay verifiers' own."""

    def __init__(
        self, policy: PolicyClient, requires_tunnel: bool = False, state_service_secrets: Collection[str] = ()
    ) -> None:
        super().__init__(None, requires_tunnel, state_service_secrets)
        self._policy = policy

    def register(self, session: RolloutSession) -> tuple[str, str]:
        secrets = super().register(session)
        if session.ctx.client == POLICY_ENDPOINT:
            session.client = self._policy
        return secrets

    async def turn(self, secret: str, messages: Messages) -> None:
        """One model turn of the session with ``secret``, as a request of its harness would take it, in process.

        Returns without a turn when a limit or a stop refuses it. Raises what the model call or a hook raises.
        """
        session = self.sessions[secret]
        if session.stopped or await session.refused() is not None:
            return
        request, rewrites, stopped = await session.rewrite_request(Request(messages=messages))
        trace = session.trace
        trace.request_rewrites.extend(rewrites)
        turn = prepare_turn(trace, request.messages, request.tools)
        if stopped is not None:
            turn.commit_prompt()
            trace.stop(stopped)
            return
        call = ModelCall(model=session.ctx.model, endpoint=_CHAT.upstream_path, time=TimeSpan(start=time.time()))
        try:
            assert session.client is not None  # register() gave it one
            response = await session.client.get_response(
                _CHAT, {"model": session.ctx.model}, session.ctx.sampling, session_id=trace.id, turn=turn
            )
            response, stopped = await _rewritten(session, response)
            call.finish_reason, call.usage = response.finish_reason, response.usage
            call.node = commit_first_turn(turn, response) if not trace.nodes else turn.commit(response)
            session.consume_prepared(turn.tail)
            if stopped is not None:
                trace.stop(stopped)
        except BaseException as error:
            call.error = Error(type=type(error).__name__, message=str(error))
            raise
        finally:
            if call.node is None:
                turn.abandon()
            call.time.end = time.time()
            trace.calls.append(call)
            trace.notify()


async def _rewritten(session: RolloutSession, response: Response) -> tuple[Response, str | None]:
    if not session.response_interceptors and not session.response_stops:
        return response, None
    response, rewrites, stopped = await session.rewrite_response(response)
    session.trace.response_rewrites.extend(rewrites)
    return response, stopped


class InProcessChat(NullHarness):
    """verifiers' tool-less chat loop (``null``) without its subprocess: one model turn a segment."""

    def __init__(self, config: HarnessConfig, interception: PolicyInterception) -> None:
        super().__init__(NullHarnessConfig.model_validate(config.model_dump()))
        self._interception = interception

    async def setup(self, runtime: Runtime) -> None:
        """Nothing to provision."""

    async def launch(
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: Messages = [] if system is None else [SystemMessage(content=system)]
        messages += [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        await self._interception.turn(secret, messages)
        return ProgramResult(exit_code=0, stdout="", stderr="")
