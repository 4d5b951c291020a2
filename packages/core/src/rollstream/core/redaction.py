"""Secrets taken out of what people get to read: log lines and error messages."""

from __future__ import annotations

import re
from typing import Any

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
