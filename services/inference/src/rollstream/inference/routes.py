"""Our routes on the engine's app, as an ASGI middleware in front of vLLM's own."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from rollstream.inference import generate
from rollstream.inference.versioned import Load, VersionedEngine
from rollstream.inference.weights import HALF_LOADED

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024


class LoadOrder(msgspec.Struct):
    """Body of ``POST /rollstream/load``: which version directory to load, and the content digest it must have."""

    directory: str
    timeline: int
    version: int
    digest: str = ""


class Disconnected(Exception):
    """The client left before its answer."""


@dataclass(frozen=True)
class Served:
    """What the routes work on; the server puts it on the app's state before it serves."""

    engine: VersionedEngine
    models: list[str]
    load: Load
    admin_token: str


class Routes:
    """Serves the token route, liveness, status and weight loading; everything else is vLLM's.

    Added through vLLM's ``--middleware``, which makes it without arguments; hence :class:`Served` on the app's state.
    ``/rollstream/…`` changes or reveals the engine and wants the agent's token; the rest is for the router.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._routes: dict[tuple[str, str], Callable[[Message, Receive, Send], Awaitable[None]]] = {
            ("POST", "/inference/v1/generate"): self._generate,
            ("GET", "/liveness"): self._liveness,
            ("GET", "/rollstream/status"): self._status,
            ("POST", "/rollstream/load"): self._load_weights,
        }

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        route = self._routes.get((scope.get("method", ""), scope.get("path", ""))) if scope["type"] == "http" else None
        if route is None:
            return await self._app(scope, receive, send)
        if scope["path"].startswith("/rollstream/") and not self._authorised(scope):
            return await _respond(send, 403, _error("this route is for the replica's own agent", 403))
        try:
            return await route(scope, receive, send)
        except Disconnected:
            return None
        except GracefulHTTPError as error:
            return await _respond(send, int(error.http_status), _error(error.message, int(error.http_status)))
        except (VLLMClientError, ValueError, TypeError) as error:
            return await _respond(send, 400, _error(str(error), 400))
        except EngineDeadError as error:
            return await _respond(send, 503, _error(f"the engine is dead: {error}", 503))
        except Exception as error:
            logger.exception("%s failed", scope["path"])
            return await _respond(send, 500, _error(f"{type(error).__name__}: {error}", 500))

    def _authorised(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, b"Bearer " + _served(scope).admin_token.encode())

    async def _generate(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        served = _served(scope)
        request = generate.parse(body)
        if request is None or (request.model is not None and request.model not in served.models):
            return await self._app(scope, _replay(body, receive), _respelled(send))
        session = dict(scope["headers"]).get(b"x-session-id")
        work = generate.answer(
            served.engine, request, request.model or served.models[0], session.decode() if session else None
        )
        return await _respond(send, 200, await _unless_disconnected(work, receive))

    async def _liveness(self, scope: Message, receive: Receive, send: Send) -> None:
        """A real round trip: one token through the scheduler and the model."""
        engine = _served(scope).engine
        params = SamplingParams(max_tokens=1, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        request_id = f"liveness-{id(params)}"
        async for _ in engine.generate(tokens_input([0]), params, request_id):
            pass
        await _respond(send, 200, msgspec.json.encode({"alive": True, "version": engine.label}))

    async def _status(self, scope: Message, receive: Receive, send: Send) -> None:
        served = _served(scope)
        status = {
            "version": served.engine.label,
            "in_flight": served.engine.get_num_unfinished_requests(),
            "kv_usage": served.load.kv_usage,
            "waiting": served.load.waiting,
            "capacity": served.engine.scheduler_config.max_num_seqs,
        }
        await _respond(send, 200, msgspec.json.encode(status))

    async def _load_weights(self, scope: Message, receive: Receive, send: Send) -> None:
        order = msgspec.json.decode(await _body(receive), type=LoadOrder)
        label = f"{order.timeline}:{order.version}"
        try:
            paused = await _served(scope).engine.load(Path(order.directory), label, order.digest)
        except EngineDeadError:
            raise
        except Exception as error:
            # "fatal" tells the agent that this engine must not serve again.
            fatal = HALF_LOADED in str(error)
            return await _respond(send, 500 if fatal else 409, _error(str(error), 500 if fatal else 409, fatal=fatal))
        return await _respond(send, 200, msgspec.json.encode({"version": label, "paused_seconds": paused}))


def _served(scope: Message) -> Served:
    served: Served = scope["app"].state.rollstream
    return served


async def _body(receive: Receive) -> bytes:
    chunks = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > MAX_BODY_BYTES:
            raise ValueError(f"the request body exceeds {MAX_BODY_BYTES} bytes")
        if not message.get("more_body"):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives ``body`` once more, then what really comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _respelled(send: Send) -> Send:
    """A ``send`` that gives the stock route's whole JSON answers the older spelling of tokens too. Streams pass."""
    start: Message = {}

    async def forward(message: Message) -> None:
        nonlocal start
        if message["type"] == "http.response.start" and message["status"] == 200:
            headers = dict(message["headers"])
            if headers.get(b"content-type", b"").startswith(b"application/json"):
                start = message
                return
        elif start:
            # Starlette's JSONResponse sends its body in one message.
            body = generate.respell(message["body"])
            headers = {**dict(start["headers"]), b"content-length": str(len(body)).encode()}
            await send({**start, "headers": list(headers.items())})
            message = {**message, "body": body}
        await send(message)

    return forward


async def _unless_disconnected(work: Awaitable[bytes], receive: Receive) -> bytes:
    """The result of ``work``, which is cancelled when the client leaves first (raises :class:`Disconnected`)."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(receive())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Disconnected
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


async def _respond(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(message: str, code: int, **more: Any) -> bytes:
    kind = "invalid_request_error" if code < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "code": code, **more}})
