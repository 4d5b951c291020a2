"""Structured logs: one pipeline for the console and for JSON lines, with secrets taken out."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, TextIO

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from rollstream.core.config import LogConfig

_SECRET_KEY = re.compile(r"(password|passwd|token|secret|api_?key|credential)s?$", re.IGNORECASE)
_URL_PASSWORD = re.compile(r"(\w+://[^/\s:@]*):([^/\s@]+)@")
HIDDEN = "…"


def redact(value: Any) -> Any:
    """``value`` with passwords in URLs hidden; other types pass."""
    return _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", value) if isinstance(value, str) else value


def _redact_event(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    for key, value in event.items():
        # Counts such as output_tokens are no secrets: only text can be one.
        hidden = isinstance(value, str) and _SECRET_KEY.search(key) is not None
        event[key] = HIDDEN if hidden else redact(value)
    return event


def configure_logging(config: LogConfig, component: str, *, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's loggers for this process. ``component`` stands on every line."""
    level = getattr(logging, config.level.upper())
    target = stream or sys.stderr
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    renderer: Processor = (
        structlog.processors.JSONRenderer()
        if config.json_lines
        else structlog.dev.ConsoleRenderer(colors=target.isatty(), pad_event_to=0)
    )
    structlog.contextvars.clear_contextvars()
    structlog.contextvars.bind_contextvars(component=component)
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processor=renderer))
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler], force=True)
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "nats.aio.client", "verifiers"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
