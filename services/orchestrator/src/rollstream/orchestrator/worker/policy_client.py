"""verifiers' model client for the policy: exact tokens in and out, with the version that sampled each of them.

verifiers' own train client refuses vLLM 0.32's spelling of logprobs and drops ``weight_versions``; this one keeps
both, and costs a fraction of it per turn.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
from renderers import RenderedTokens
from renderers.base import ParsedResponse, ToolCallParseStatus
from verifiers.v1.clients.client import SESSION_ID_HEADER, Client
from verifiers.v1.clients.train import response_from_generate, serialize_completion, tool_to_wire
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.types import Messages, Response, SamplingConfig, Tool

from rollstream.core.wire import Episode
from rollstream.orchestrator.worker.answer import BadAnswer, Completion, parse_answer
from rollstream.orchestrator.worker.rendering import Rendering
from rollstream.orchestrator.worker.routers import Routers

logger = logging.getLogger(__name__)

MIN_VERSION_HEADER = "X-Min-Policy-Version"
RETRY_SECONDS = (0.1, 0.3, 1.0, 2.0, 5.0)
"""Pauses before the attempts after the first; the last one repeats until the episode's deadline."""


@dataclass
class Exchange:
    """What the policy sampled in one trace (a session of the router), turn by turn."""

    episode: Episode
    completions: list[Completion] = field(default_factory=list)
    seconds: float = 0.0
    retries: int = 0


class PolicyClient(Client):
    """Renders, asks a router for tokens, and remembers the evidence until the trace is converted.

    Lifecycle: a trace is announced by :meth:`open` when it is minted and let go by :meth:`close_session`, which also
    releases the router's session. A turn is retried on other routers and replicas (connection faults, 5xx, answers
    without evidence) until whoever runs the episode cancels it; nothing of a failed attempt enters the trace.
    """

    def __init__(
        self, http: aiohttp.ClientSession, routers: Routers, rendering: Rendering, *, model: str, seq_len: int
    ) -> None:
        self._http = http
        self._routers = routers
        self._rendering = rendering
        self._model = model
        self._seq_len = seq_len
        self._exchanges: dict[str, Exchange] = {}

    def open(self, trace_id: str, episode: Episode) -> None:
        """Take note of a new trace of ``episode``."""
        self._exchanges[trace_id] = Exchange(episode)

    def exchange(self, trace_id: str) -> Exchange:
        """What was sampled for a trace so far."""
        return self._exchanges[trace_id]

    async def close_session(self, trace_id: str) -> None:
        """Forget a trace and release its session; a failure is logged and costs nothing but the session's time-out."""
        exchange = self._exchanges.pop(trace_id, None)
        if exchange is None:
            return
        try:
            async with asyncio.timeout(5):
                router = await self._routers.choose(trace_id, 0)
                async with self._http.post(f"{router}/finish_session", headers={SESSION_ID_HEADER: trace_id}) as answer:
                    answer.raise_for_status()
        except (TimeoutError, aiohttp.ClientError) as error:
            logger.warning("session %s was not released: %s: %s", trace_id, type(error).__name__, error)

    async def get_response(
        self,
        dialect: Dialect,
        body: dict[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        if not isinstance(dialect, ChatDialect):
            raise NotImplementedError(f"the policy takes chat messages only, not those of {type(dialect).__name__}")
        if session_id is None or session_id not in self._exchanges:
            raise ProviderError(f"trace {session_id} is not one of this worker's episodes", status_code=400)
        messages, tools = _conversation(dialect, body, turn)
        wire_tools = [tool_to_wire(tool) for tool in tools] if tools else None
        prompt, bridged = self._prompt(messages, wire_tools, turn)
        exchange = self._exchanges[session_id]
        request = self._request(prompt.token_ids, exchange)
        completion = await self._sample(request, session_id, exchange)
        exchange.completions.append(completion)
        parsed = self._rendering.parse(completion.token_ids, prompt.token_ids, wire_tools)
        response = response_from_generate(
            _generate_result(completion, prompt, parsed), self._model, turn if bridged else None
        )
        response.raw = serialize_completion(response, self._model)
        return response

    def _prompt(
        self, messages: Messages, tools: list[dict[str, Any]] | None, turn: PendingTurn | None
    ) -> tuple[RenderedTokens, bool]:
        """Prompt ids: the sampled history extended where the renderer can (True), else a render of the whole."""
        if turn is not None and turn.prefix_node_ids:
            previous = turn.previous_renderer_token_ids()
            tail = [message_to_wire(message) for message in turn.tail]
            if previous is not None and _extends(tail):
                bridged = self._rendering.renderer.bridge_to_next_turn(*previous, tail, tools=tools)
                if bridged is not None:
                    return bridged, True
        return self._rendering.render([message_to_wire(message) for message in messages], tools), False

    def _request(self, prompt: list[int], exchange: Exchange) -> bytes:
        """Body of the token request. Training sampling is fixed: top_p 1, no top-k, no min_p, temperature > 0."""
        room = self._seq_len - len(prompt)
        if room < 1:
            raise ProviderError(
                f"the prompt has {len(prompt)} tokens, seq_len is {self._seq_len}: nothing is left to sample",
                status_code=400,
            )
        wanted = exchange.episode.sampling
        params: dict[str, Any] = {
            **wanted.extra,
            "temperature": wanted.temperature,
            "max_tokens": min(wanted.max_tokens or room, room),
            "stop_token_ids": self._rendering.stop_token_ids,
            "skip_special_tokens": False,
            "logprobs": 0,
        }
        if wanted.seed is not None:
            params["seed"] = turn_seed(exchange.episode, len(exchange.completions))
        return msgspec.json.encode({"model": self._model, "token_ids": prompt, "sampling_params": params})

    async def _sample(self, request: bytes, session: str, exchange: Exchange) -> Completion:
        loop = asyncio.get_running_loop()
        started = loop.time()
        episode = exchange.episode
        headers = {
            SESSION_ID_HEADER: session,
            MIN_VERSION_HEADER: f"{episode.timeline}:{episode.min_version}",
            "Content-Type": "application/json",
        }
        attempt = 0
        try:
            while True:
                try:
                    return await self._ask(request, session, headers, attempt)
                except (aiohttp.ClientError, TimeoutError, BadAnswer, _Unavailable) as error:
                    pause = RETRY_SECONDS[min(attempt, len(RETRY_SECONDS) - 1)]
                    logger.warning("turn of %s: %s: %s; again in %.1f s", session, type(error).__name__, error, pause)
                    attempt += 1
                    exchange.retries += 1
                    await asyncio.sleep(pause)
        finally:
            exchange.seconds += loop.time() - started

    async def _ask(self, request: bytes, session: str, headers: dict[str, str], attempt: int) -> Completion:
        router = await self._routers.choose(session, attempt)
        async with self._http.post(f"{router}/inference/v1/generate", data=request, headers=headers) as answer:
            body = await answer.read()
            if answer.status >= 500 or answer.status in (408, 429):
                raise _Unavailable(f"{answer.status} from {router}: {_excerpt(body)}")
            if answer.status >= 400:
                raise ProviderError(f"{answer.status} from {router}: {_excerpt(body)}", status_code=answer.status)
            return parse_answer(body)


class _Unavailable(RuntimeError):
    """Nobody can serve the request right now; it is worth another attempt."""


def turn_seed(episode: Episode, turn: int) -> int:
    """Engine seed of one turn: members of a group must not sample the same tokens."""
    key = f"{episode.sampling.seed}/{episode.group}/{episode.member}/{turn}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") & 0x7FFFFFFF


def _conversation(dialect: ChatDialect, body: dict[str, Any], turn: PendingTurn | None) -> tuple[Messages, list[Tool]]:
    if turn is not None:
        return turn.prompt, turn.tools
    parsed = dialect.parse_request(body)
    return parsed.messages, parsed.tools or []


def _extends(tail: list[dict[str, Any]]) -> bool:
    """Whether a renderer may extend sampled history by ``tail``: tool results, then at most one user message."""
    roles = [message["role"] for message in tail]
    return bool(roles) and all(role == "tool" for role in roles[:-1]) and roles[-1] in ("tool", "user")


def _generate_result(completion: Completion, prompt: RenderedTokens, parsed: ParsedResponse) -> dict[str, Any]:
    """In the shape of ``renderers.client.generate``, which verifiers turns into its response."""
    finish = completion.finish_reason
    if finish == "stop" and any(call.status == ToolCallParseStatus.OK for call in parsed.tool_calls):
        finish = "tool_calls"
    return {
        "request_id": completion.request_id,
        "prompt_ids": list(prompt.token_ids),
        "completion_ids": completion.token_ids,
        "completion_logprobs": completion.logprobs,
        "content": parsed.content,
        "reasoning_content": parsed.reasoning_content,
        "tool_calls": parsed.tool_calls,
        "finish_reason": finish,
        "prompt_attribution": prompt,
    }


def _excerpt(body: bytes) -> str:
    return body[:300].decode(errors="replace").replace("\n", " ")
