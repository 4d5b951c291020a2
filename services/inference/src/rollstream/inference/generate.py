"""Token-in, token-out route without vLLM's HTTP layers: plain text-free requests, answered whole.

The stock route validates and serialises through pydantic, which costs more than the sampling of a short completion.
This one reads the same request and writes the same answer; what it does not know it leaves to the stock route.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from typing import Any

import msgspec
from vllm.inputs.engine import tokens_input
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rollstream.inference.versioned import VersionedEngine

MISSING_LOGPROB = -9999.0
"""vLLM's floor for a logprob that is missing, NaN or minus infinity; clients refuse it as evidence."""

_counter = itertools.count()


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The part of vLLM's GenerateRequest that this route serves; any other field goes to the stock route."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    model: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: str | None = None
    stream: bool = False


class TokenLogprob(msgspec.Struct):
    """One sampled token, in the spelling of vLLM 0.32 (``token_id``) and of its predecessors (``token``)."""

    token: str
    token_id: int
    logprob: float
    rank: int | None
    top_logprobs: list[dict[str, Any]] = []


_request_decoder = msgspec.json.Decoder(GenerateRequest)
_answer_encoder = msgspec.json.Encoder()


def parse(body: bytes) -> GenerateRequest | None:
    """The request, or None when it is not one that this route serves (the stock route then has the say)."""
    try:
        request = _request_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None
    return None if request.stream else request


def sampling_of(request: GenerateRequest, context: int) -> SamplingParams:
    """vLLM's sampling parameters for ``request``; ``context`` is the engine's longest sequence in tokens.

    Raises ``ValueError`` or ``TypeError`` for parameters that vLLM refuses.
    """
    fields = dict(request.sampling_params)
    if fields.get("max_tokens") is None:
        fields["max_tokens"] = max(context - len(request.token_ids), 1)
    if fields.get("logprobs") == 1:
        # The answer to 1 holds the sampled token alone, as the answer to 0 does, which needs no top-k.
        fields["logprobs"] = 0
    if not fields.get("stop"):
        fields["detokenize"] = False
    params = SamplingParams(**fields)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


async def answer(engine: VersionedEngine, request: GenerateRequest, model: str, session: str | None) -> bytes:
    """Sample and return the answer's JSON. Raises vLLM's errors; cancelling it aborts the request."""
    context = engine.model_config.max_model_len
    params = sampling_of(request, context)
    request_id = f"generate-tokens-{request.request_id or f'{os.getpid()}-{next(_counter)}'}"
    outputs = engine.generate(
        tokens_input(request.token_ids, cache_salt=request.cache_salt),
        params,
        request_id,
        priority=request.priority,
        session_id=session,
    )
    final = [output async for output in outputs][-1]
    sampled = sum(len(output.token_ids) for output in final.outputs)
    return _answer_encoder.encode(
        {
            "request_id": request_id,
            "created": int(time.time()),
            "model": model,
            "choices": [_choice(output, params.logprobs) for output in final.outputs],
            "usage": {
                "prompt_tokens": len(request.token_ids),
                "completion_tokens": sampled,
                "total_tokens": len(request.token_ids) + sampled,
            },
        }
    )


def respell(body: bytes) -> bytes:
    """The stock route's answer with ``token`` beside each ``token_id``, as vLLM up to 0.31 and its clients spell it."""
    answer = msgspec.json.decode(body)
    for choice in answer.get("choices", ()):
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            if "token_id" in entry:
                entry.setdefault("token", f"token_id:{entry['token_id']}")
    return _answer_encoder.encode(answer)


def _choice(output: CompletionOutput, top: int | None) -> dict[str, Any]:
    if output.finish_reason == "error":
        raise RuntimeError("the engine ended the request with an internal error; see the engine's log")
    return {
        "index": output.index,
        "token_ids": list(output.token_ids),
        "logprobs": None if top is None else {"content": _logprobs(output, top)},
        "finish_reason": output.finish_reason or "stop",
        "stop_reason": output.stop_reason,
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in output.weight_versions or ()
        ],
    }


def _logprobs(output: CompletionOutput, top: int) -> list[TokenLogprob]:
    entries = []
    for token_id, candidates in zip(output.token_ids, output.logprobs or (), strict=True):
        candidates = candidates or {}
        sampled = candidates.get(token_id)
        entry = TokenLogprob(
            token=f"token_id:{token_id}",
            token_id=token_id,
            logprob=_finite(sampled.logprob) if sampled else MISSING_LOGPROB,
            rank=(sampled.rank or None) if sampled else None,
        )
        if top:
            chosen = list(candidates.items())
            entry.top_logprobs = [
                {"token_id": other, "logprob": _finite(value.logprob), "rank": value.rank or None}
                for other, value in (chosen if top == -1 else chosen[:top])
            ]
        entries.append(entry)
    return entries


def _finite(logprob: float) -> float:
    return MISSING_LOGPROB if math.isnan(logprob) else max(logprob, MISSING_LOGPROB)
