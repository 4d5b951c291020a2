"""Structured logs: one pipeline for the console and for JSON lines, with secrets taken out."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.types import EventDict, Processor, WrappedLogger

from rollstream.core.config import LogConfig
from rollstream.core.redaction import redact


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
