"""A scripted engine: the HTTP surface of a replica's engine without vLLM, for fault tests.

``python scripted_engine.py --model NAME --announce FILE [--host H] [--port P] [--token-delay S] …`` starts in well
under a second. Tokens are drawn from a pseudo-random policy that is a pure function of (version label, context): the
same weights give the same logprobs, other weights others. The draw itself is seeded by the session (or ``seed``), so
members of a group differ. ``POST /scripted/behaviour`` changes the flags below while it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from rollstream.core.run import WeightsDamaged
from rollstream.inference.announce import announce
from rollstream.inference.weights import verified_files

COMMAND = [sys.executable, "-P", str(Path(__file__).resolve())]
"""``inference.engine_command`` of this engine; -P keeps this folder's modules from hiding the standard library's."""


@dataclasses.dataclass
class Behaviour:
    """What goes wrong, and how slow the engine is (seconds)."""

    token_delay: float = 0.0
    load_delay: float = 0.0
    failing_loads: int = 0
    fatal_loads: int = 0
    hang_loads: bool = False
    failing_generations: int = 0
    unhealthy: bool = False


def policy(label: str, context: list[int], vocabulary: int, temperature: float) -> list[float]:
    """Log-probabilities over token ids [0, vocabulary) after ``temperature``; a pure function of its arguments."""
    state = hashlib.sha256(f"{label}|{','.join(map(str, context))}".encode()).digest()
    stream = hashlib.shake_256(state).digest(vocabulary)
    logits = [byte / 64 / temperature for byte in stream]
    top = max(logits)
    norm = top + math.log(sum(math.exp(value - top) for value in logits))
    return [value - norm for value in logits]


def draw(logprobs: list[float], seed: str) -> int:
    """Inverse-CDF draw with a uniform number hashed from ``seed``."""
    uniform = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "big") / 2**64
    for token, logprob in enumerate(logprobs):
        uniform -= math.exp(logprob)
        if uniform < 0:
            return token
    return len(logprobs) - 1


class ScriptedEngine:
    """State of one engine: its label, its requests in flight, its behaviour."""

    def __init__(self, model: str, label: str, vocabulary: int, context: int, behaviour: Behaviour) -> None:
        self.model, self.label, self.vocabulary, self.context = model, label, vocabulary, context
        self.behaviour = behaviour
        self.in_flight = 0
        self.served = 0
        self.token = os.environ.get("ROLLSTREAM_ENGINE_ADMIN_TOKEN", "")
        # vLLM carries the dead letter of a half-loaded model the same way: it must not serve again.
        self.broken = False

    def app(self) -> web.Application:
        """The routes of a replica's engine."""
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes([
            web.post("/inference/v1/generate", self.generate), web.get("/health", self.health),
            web.get("/liveness", self.liveness), web.get("/v1/models", self.models),
            web.get("/rollstream/status", self.status), web.post("/rollstream/load", self.load),
            web.post("/scripted/behaviour", self.change),
        ])
        return app

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.behaviour.failing_generations > 0:
            self.behaviour.failing_generations -= 1
            return _error(500, "scripted failure")
        params = body.get("sampling_params", {})
        prompt = list(body["token_ids"])
        if not prompt or len(prompt) >= self.context:
            return _error(400, f"the prompt has {len(prompt)} tokens; between 1 and {self.context - 1} fit")
        seed = f"{params.get('seed')}|{request.headers.get('X-Session-ID', '')}"
        self.in_flight += 1
        try:
            choice = await self.sample(prompt, params, seed)
        finally:
            self.in_flight -= 1
            self.served += 1
        sampled = len(choice["token_ids"])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": sampled, "total_tokens": len(prompt) + sampled}
        return web.json_response({
            "request_id": f"generate-tokens-{self.served}", "created": int(time.time()), "model": self.model,
            "choices": [choice], "usage": usage,
        })

    async def sample(self, prompt: list[int], params: dict[str, Any], seed: str) -> dict[str, Any]:
        """Token by token, so that a weight update in between shows in the spans."""
        limit = min(params.get("max_tokens") or self.context, self.context - len(prompt))
        stops = set(params.get("stop_token_ids") or ())
        temperature = params.get("temperature") or 1.0
        tokens: list[int] = []
        content: list[dict[str, Any]] = []
        spans: list[dict[str, Any]] = []
        finish = "length"
        for position in range(limit):
            await asyncio.sleep(self.behaviour.token_delay)
            logprobs = policy(self.label, prompt + tokens, self.vocabulary, temperature)
            token = draw(logprobs, f"{seed}|{self.label}|{prompt}|{position}")
            tokens.append(token)
            content.append({"token": f"token_id:{token}", "token_id": token, "logprob": logprobs[token],
                            "rank": 1 + sum(value > logprobs[token] for value in logprobs), "top_logprobs": []})
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": position, "end": position})
            spans[-1]["end"] = position + 1
            if token in stops:
                finish = "stop"
                break
        return {"index": 0, "token_ids": tokens, "logprobs": {"content": content}, "finish_reason": finish,
                "stop_reason": tokens[-1] if finish == "stop" else None, "weight_versions": spans}

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.behaviour.unhealthy or self.broken else 200)

    async def liveness(self, request: web.Request) -> web.Response:
        if self.behaviour.unhealthy or self.broken:
            return _error(503, "scripted: unhealthy")
        return web.json_response({"alive": True, "version": self.label})

    async def models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "owned_by": "rollstream", "max_model_len": self.context}
        return web.json_response({"object": "list", "data": [card]})

    async def status(self, request: web.Request) -> web.Response:
        if not self.allowed(request):
            return _error(403, "this route is for the replica's own agent")
        usage = min(self.in_flight / 256, 1.0)
        return web.json_response(
            {"version": self.label, "in_flight": self.in_flight, "kv_usage": usage, "waiting": 0, "capacity": 256}
        )

    async def load(self, request: web.Request) -> web.Response:
        if not self.allowed(request):
            return _error(403, "this route is for the replica's own agent")
        order = await request.json()
        await asyncio.sleep(3600 if self.behaviour.hang_loads else self.behaviour.load_delay)
        if self.behaviour.fatal_loads > 0:
            self.behaviour.fatal_loads -= 1
            self.broken = True
            return _error(500, "scripted: model half loaded", fatal=True)
        if self.behaviour.failing_loads > 0:
            self.behaviour.failing_loads -= 1
            return _error(409, "scripted: load refused", fatal=False)
        try:
            verified_files(Path(order["directory"]), order.get("digest", ""))
        except WeightsDamaged as error:
            return _error(409, str(error), fatal=False)
        self.label = f"{order['timeline']}:{order['version']}"
        return web.json_response({"version": self.label, "paused_seconds": 0.0})

    async def change(self, request: web.Request) -> web.Response:
        self.behaviour = dataclasses.replace(self.behaviour, **await request.json())
        return web.json_response(dataclasses.asdict(self.behaviour))

    def allowed(self, request: web.Request) -> bool:
        return request.headers.get("Authorization") == f"Bearer {self.token}"


def _error(status: int, message: str, **more: Any) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status, **more}}, status=status)


async def serve(arguments: argparse.Namespace) -> None:
    """Bind, announce, serve until SIGTERM."""
    behaviour = Behaviour(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Behaviour)})
    engine = ScriptedEngine(
        arguments.model, arguments.label, arguments.vocabulary, arguments.context, behaviour
    )
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, arguments.host, arguments.port)
    await site.start()
    host, port = runner.addresses[0][:2]
    if arguments.announce:
        announce(arguments.announce, f"http://{host}:{port}")
    else:
        print(json.dumps({"url": f"http://{host}:{port}"}), flush=True)
    ended = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, ended.set)
    await ended.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(runner.cleanup(), 5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--label", default="base")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--announce", type=Path)
    parser.add_argument("--vocabulary", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    for field in dataclasses.fields(Behaviour):
        kind: Any = {"float": float, "int": int, "bool": bool}[str(field.type)]
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
