"""Structured logs: one pipeline for the console and for JSON lines, with secrets taken out."""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, TextIO

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from rollstream.core.config import LogConfig

_SECRET_WORD = r"(?:password|passwd|token|secret|api[_-]?key|credential|authorization|cookie)"
_SECRET_KEY = re.compile(rf"{_SECRET_WORD}s?$", re.IGNORECASE)
HIDDEN = "…"
_IN_TEXT: tuple[tuple[re.Pattern[str], str], ...] = (
    # Everything before the @ of a URL: a NATS token stands alone there, without a colon.
    (re.compile(r"(\w+://)[^/\s'\"]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic) +[\w.~+/=-]+", re.IGNORECASE), rf"\1 {HIDDEN}"),
    # key=value and "key": "value", with a value that is too long to be a count.
    (re.compile(rf"({_SECRET_WORD}['\"]?\s*[=:]\s*['\"]?)(?!Bearer |Basic )[^\s'\",)}}\]]{{6,}}", re.IGNORECASE),
     rf"\1{HIDDEN}"),
)  # fmt: skip


def redact(value: Any, key: str = "") -> Any:
    """``value`` fit for a log line: text under the name of a secret and secrets inside text are hidden.

    Numbers pass (a count such as ``output_tokens`` is no secret), containers are taken apart, anything else becomes
    text, so that no ``repr`` can bring a secret in later.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {name: redact(item, str(name)) for name, item in value.items()}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):  # a header
        return [redact(value[0], key), redact(value[1], value[0])]
    if isinstance(value, list | tuple | set | frozenset):
        return [redact(item, key) for item in value]
    if _SECRET_KEY.search(key):
        return HIDDEN
    text = str(value)
    for pattern, kept in _IN_TEXT:
        text = pattern.sub(kept, text)
    return text


def _redact_event(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    # Names that begin with _ are structlog's own and never rendered.
    return {key: value if key.startswith("_") else redact(value, key) for key, value in event.items()}


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
        else structlog.dev.ConsoleRenderer(
            colors=target.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
        )
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
