"""Logs: one line an event with its component, in both formats, and no secret in any of them."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from rollstream.core.config import LogConfig
from rollstream.core.telemetry import configure_logging, redact

SECRET = "hunter2hunter2"


@pytest.fixture(params=[False, True], ids=["console", "json"])
def written(request: pytest.FixtureRequest) -> io.StringIO:
    stream = io.StringIO()
    configure_logging(LogConfig(level="info", json_lines=request.param), "trainer", stream=stream)
    return stream


@pytest.mark.parametrize(
    "event",
    [
        {"event": f"redis://user:{SECRET}@host/0 is away"},
        {"event": f"redis://:{SECRET}@with@at@host/0"},
        {"event": f"nats://{SECRET}@host:4222 is away"},
        {"event": f"WANDB_API_KEY={SECRET}"},
        {"event": f'{{"api_key": "{SECRET}", "steps": 3}}'},
        {"event": f"Authorization: Bearer {SECRET}"},
        {"event": "x", "password": SECRET},
        {"event": "x", "wandb_api_key": SECRET, "credentials": SECRET},
        {"event": "x", "path": Path(f"/secret={SECRET}")},
        {"event": "x", "config": {"store": {"password": SECRET}, "urls": [f"nats://{SECRET}@h"]}},
        {"event": "x", "headers": [("authorization", SECRET), ("accept", "*/*")]},
        {"event": "x", "headers": {"Authorization": f"Bearer {SECRET}"}},
        {"event": "x", "request": RuntimeError(f"nats://{SECRET}@h")},
    ],
    ids=lambda event: "-".join(event),
)
def test_secrets_are_hidden(written: io.StringIO, event: dict[str, object]) -> None:
    structlog.get_logger("x").warning(**event)
    assert SECRET not in written.getvalue()
    assert "…" in written.getvalue() or "\\u2026" in written.getvalue()


def test_secrets_in_exceptions_and_in_library_logs_are_hidden(written: io.StringIO) -> None:
    try:
        raise ValueError(f"redis://:{SECRET}@host")
    except ValueError:
        structlog.get_logger("x").exception("failed")
        logging.getLogger("library").exception("cannot reach %s", f"nats://{SECRET}@host")
    logging.getLogger("library").warning("settings %s", {"password": SECRET})
    text = written.getvalue()
    assert SECRET not in text and text.count("ValueError") == 4 and "cannot reach" in text


def test_what_is_no_secret_stands(written: io.StringIO) -> None:
    structlog.get_logger("x").info(
        "step", output_tokens=512, token_count=3, step=7, address="http://127.0.0.1:80/metrics", ratio=0.5, none=None,
        text="max_tokens: 64, tokens=4096", mail="a@b", tokeniser="Qwen3",
    )  # fmt: skip
    text = written.getvalue()
    assert "…" not in text and "\\u2026" not in text
    for piece in ("512", "http://127.0.0.1:80/metrics", "max_tokens: 64, tokens=4096", "a@b", "Qwen3"):
        assert piece in text


def test_lines_carry_their_component_and_level(written: io.StringIO) -> None:
    structlog.get_logger("x").debug("too quiet")
    structlog.get_logger("x").info("loud", step=1)
    logging.getLogger("httpx").info("a request")
    [line] = written.getvalue().splitlines()
    assert "trainer" in line and "loud" in line and "info" in line
    if line.startswith("{"):
        assert json.loads(line).items() >= {"component": "trainer", "event": "loud", "level": "info", "step": 1}.items()


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3)))
def test_redaction_takes_anything_and_json_can_write_it(value: object) -> None:
    json.dumps(redact(value))


@given(st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=12, max_size=40), st.sampled_from(["", "user:", ":"]))
def test_no_url_shows_who_may_enter(secret: str, before: str) -> None:
    assert secret not in redact(f"tried redis://{before}{secret}@10.0.0.1:6379/0 twice")
