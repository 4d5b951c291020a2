"""The engine's answer to a token request, checked: what cannot be trained on exactly is refused, never guessed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec

MISSING_LOGPROB = -9999.0
"""vLLM writes this for a missing, NaN or minus-infinite logprob; it is no evidence of what was sampled."""


class BadAnswer(ValueError):
    """The answer lacks something that training needs; the message says what."""


@dataclass(frozen=True)
class PolicySpan:
    """Completion positions ``[start, end)`` sampled by ``version`` of ``timeline``."""

    timeline: int
    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Completion:
    """One sampled completion of n tokens: ids, their own logprobs after temperature, spans that tile [0, n)."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    spans: tuple[PolicySpan, ...]
    finish_reason: str | None


class _Logprob(msgspec.Struct):
    logprob: float
    token_id: int | None = None
    token: str = ""


class _Logprobs(msgspec.Struct):
    content: list[_Logprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    request_id: str = ""


_decoder = msgspec.json.Decoder(_Answer)


def parse_answer(body: bytes) -> Completion:
    """The completion in ``body`` (JSON of ``/inference/v1/generate``); raises :class:`BadAnswer`."""
    try:
        answer = _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BadAnswer(f"the engine's answer is not that of /inference/v1/generate: {error}") from error
    if len(answer.choices) != 1:
        raise BadAnswer(f"the engine answered with {len(answer.choices)} choices, asked for one")
    choice = answer.choices[0]
    return Completion(
        request_id=answer.request_id,
        token_ids=choice.token_ids,
        logprobs=_sampled_logprobs(choice),
        spans=_policy_spans(choice),
        finish_reason=choice.finish_reason,
    )


def _sampled_logprobs(choice: _Choice) -> list[float]:
    entries = choice.logprobs.content if choice.logprobs is not None else []
    if len(entries) != len(choice.token_ids):
        raise BadAnswer(f"{len(choice.token_ids)} sampled tokens came with {len(entries)} logprobs")
    values = []
    for position, (token, entry) in enumerate(zip(choice.token_ids, entries, strict=True)):
        # vLLM up to 0.31 names the token "token_id:<n>", 0.32 sends the number.
        named = entry.token_id == token if entry.token_id is not None else entry.token == f"token_id:{token}"
        if not named:
            raise BadAnswer(f"the logprob at position {position} belongs to another token than the sampled {token}")
        if not math.isfinite(entry.logprob) or entry.logprob <= MISSING_LOGPROB:
            raise BadAnswer(f"the logprob at position {position} is missing (the engine sent {entry.logprob})")
        values.append(entry.logprob)
    return values


def _policy_spans(choice: _Choice) -> tuple[PolicySpan, ...]:
    total = len(choice.token_ids)
    spans = tuple(
        PolicySpan(*parse_label(span.version), span.start, span.end)
        for span in choice.weight_versions or ()
        if span.end > span.start
    )
    reached = 0
    for span in spans:
        if span.start != reached:
            break
        reached = span.end
    if reached != total:
        raise BadAnswer(f"weight_versions account for {reached} of {total} sampled tokens")
    return spans


def parse_label(label: str) -> tuple[int, int]:
    """(timeline, version) of an engine's weight label "<timeline>:<version>"; raises :class:`BadAnswer`."""
    timeline, colon, version = label.partition(":")
    if colon and timeline.isdigit() and version.isdigit():
        return int(timeline), int(version)
    raise BadAnswer(f"the engine's weights are labelled {label!r}, not <timeline>:<version>: no version of the policy")
