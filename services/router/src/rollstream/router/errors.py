"""Errors in the shape that OpenAI clients understand, and the answers that the router writes itself."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

import msgspec

JSON = b"application/json"
HeaderPairs = Sequence[tuple[bytes, bytes]]

_TYPES = {
    400: "invalid_request_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    417: "invalid_request_error",
    431: "invalid_request_error",
    501: "invalid_request_error",
    504: "timeout_error",
}


class HTTPError(Exception):
    """An answer that is an error. ``message`` says what is wrong and what to do about it."""

    def __init__(self, status: int, code: str, message: str, headers: HeaderPairs = ()) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``."""
        error = {
            "message": self.message,
            "type": _TYPES.get(self.status, "server_error"),
            "param": None,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})


def answer(
    status: int,
    body: bytes,
    *,
    content_type: bytes = JSON,
    headers: HeaderPairs = (),
    close: bool = False,
    without_body: bool = False,
) -> bytes:
    """A whole HTTP/1.1 response. ``without_body`` answers a HEAD request: the length is stated, the body left out."""
    parts = [
        b"HTTP/1.1 %d %b\r\n" % (status, HTTPStatus(status).phrase.encode()),
        b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, len(body)),
    ]
    parts += [b"%b: %b\r\n" % pair for pair in headers]
    if close:
        parts.append(b"connection: close\r\n")
    parts.append(b"\r\n")
    if not without_body:
        parts.append(body)
    return b"".join(parts)
