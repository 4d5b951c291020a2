"""The engine's answer: both spellings are read, everything that would train wrongly is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollstream.orchestrator.worker.answer import BadAnswer, PolicySpan, parse_answer, parse_label


def answer(**changes: Any) -> bytes:
    choice = {
        "index": 0,
        "token_ids": [7, 8, 9],
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in (7, 8, 9)]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "1:4", "start": 0, "end": 2}, {"version": "1:5", "start": 2, "end": 3}],
    }
    return json.dumps({"request_id": "r", "choices": [{**choice, **changes}]}).encode()


def test_tokens_logprobs_and_spans_are_read() -> None:
    completion = parse_answer(answer())
    assert completion.token_ids == [7, 8, 9] and completion.logprobs == [-0.5] * 3
    assert completion.spans == (PolicySpan(1, 4, 0, 2), PolicySpan(1, 5, 2, 3))
    assert completion.finish_reason == "stop"


def test_the_spelling_of_older_engines_is_read_too() -> None:
    old = {"content": [{"token": f"token_id:{token}", "logprob": -0.5} for token in (7, 8, 9)]}
    assert parse_answer(answer(logprobs=old)).logprobs == [-0.5] * 3


def test_an_empty_completion_needs_no_evidence() -> None:
    completion = parse_answer(answer(token_ids=[], logprobs={"content": []}, weight_versions=[]))
    assert completion.token_ids == [] and completion.spans == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "3 sampled tokens came with 0 logprobs"),
        ({"logprobs": {"content": [{"token_id": 7, "logprob": -1.0}]}}, "came with 1 logprobs"),
        ({"logprobs": {"content": [{"token_id": t, "logprob": -9999.0} for t in (7, 8, 9)]}}, "position 0 is missing"),
        ({"logprobs": {"content": [{"token_id": t, "logprob": -1.0} for t in (7, 8, 1)]}}, "another token"),
        ({"logprobs": {"content": [{"token": t, "logprob": -1.0} for t in "abc"]}}, "another token"),
        ({"weight_versions": None}, "account for 0 of 3"),
        ({"weight_versions": [{"version": "1:4", "start": 1, "end": 3}]}, "account for 0 of 3"),
        ({"weight_versions": [{"version": "1:4", "start": 0, "end": 2}]}, "account for 2 of 3"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 3}]}, "labelled 'default'"),
    ],
)
def test_what_cannot_be_trained_exactly_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadAnswer, match=message):
        parse_answer(answer(**changes))


def test_other_json_and_several_choices_are_refused() -> None:
    with pytest.raises(BadAnswer, match="not that of"):
        parse_answer(b'{"choices": 3}')
    with pytest.raises(BadAnswer, match="not that of"):
        parse_answer(b"<html>")
    with pytest.raises(BadAnswer, match="0 choices"):
        parse_answer(b'{"choices": []}')


@pytest.mark.parametrize("label", ["", "1", "1:", ":1", "a:1", "1:-1", "1:2:3"])
def test_labels_that_name_no_version(label: str) -> None:
    with pytest.raises(BadAnswer):
        parse_label(label)
