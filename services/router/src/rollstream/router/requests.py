"""A client's request as the router sees it: what routing needs, the rest as bytes."""

from __future__ import annotations

from collections.abc import Callable

from rollstream.router.errors import HTTPError

# Headers of one connection, not of the request: they are never forwarded (RFC 9110 §7.6.1). The body is forwarded with
# a Content-Length of our own, because it is complete before a replica is chosen.
_DROPPED = frozenset(
    (
        b"connection",
        b"content-length",
        b"expect",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_CONNECTION_OPTIONS = frozenset((b"", b"close", b"keep-alive", b"upgrade", b"te", b"http2-settings"))
MAX_SESSION_CHARS = 256


class Request:
    """One request, filled by the connection's parser and immutable once it is complete.

    ``headers`` holds what is forwarded, names and values as they came.
    """

    __slots__ = (
        "body",
        "chunked",
        "expects_continue",
        "has_host",
        "head_bytes",
        "headers",
        "http_version",
        "keep_alive",
        "length",
        "method",
        "min_version",
        "session",
        "size",
        "target",
        "unforwarded",
    )

    def __init__(self) -> None:
        self.method = b""
        self.target = b""
        self.http_version = "1.1"
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: list[bytes] = []
        self.size = 0
        """Bytes of body so far."""
        self.length: int | None = None
        self.chunked = False
        self.head_bytes = 0
        self.keep_alive = True
        self.expects_continue = False
        self.has_host = False
        self.session: str | None = None
        self.min_version: bytes | None = None
        self.unforwarded: frozenset[bytes] = frozenset()
        """Further header names that the client's Connection header keeps to this connection."""

    def add_header(self, name: bytes, value: bytes) -> HTTPError | None:
        """Takes one header; an error means that the request must be refused."""
        self.head_bytes += len(name) + len(value) + 4
        lower = name.lower()
        if lower not in _DROPPED:
            self.headers.append((name, value))
        take = _TAKERS.get(lower)
        return take(self, value) if take is not None else None

    @property
    def path(self) -> bytes:
        """Path without query, and without scheme and authority when the client sent an absolute URL."""
        target = self.target.split(b"?", 1)[0]
        if target[:1] != b"/" and target[:4].lower() == b"http":
            rest = target.split(b"://", 1)[-1]
            slash = rest.find(b"/")
            return rest[slash:] if slash >= 0 else b"/"
        return target

    def forwarded_target(self) -> bytes:
        """Path and query in origin form."""
        if self.target[:1] == b"/":
            return self.target
        _, question, query = self.target.partition(b"?")
        return self.path + question + query

    def forwarded_head(self) -> bytes:
        """The head that a replica gets: same version, headers in order, the body's length stated."""
        parts = [self.method, b" ", self.forwarded_target(), b" HTTP/", self.http_version.encode(), b"\r\n"]
        if self.unforwarded:
            self.headers = [pair for pair in self.headers if pair[0].lower() not in self.unforwarded]
        for name, value in self.headers:
            parts += (name, b": ", value, b"\r\n")
        if self.size or self.method not in (b"GET", b"HEAD"):
            parts.append(b"content-length: %d\r\n" % self.size)
        parts.append(b"\r\n")
        return b"".join(parts)


def _take_length(request: Request, value: bytes) -> HTTPError | None:
    request.length = int(value) if value.isdigit() else None
    return None


def _take_coding(request: Request, value: bytes) -> HTTPError | None:
    request.chunked = True
    if value.strip().lower() == b"chunked":
        return None
    return HTTPError(501, "unsupported_transfer_encoding", "Only `Transfer-Encoding: chunked` is understood.")


def _take_connection(request: Request, value: bytes) -> HTTPError | None:
    options = {option.strip().lower() for option in value.split(b",")}
    request.unforwarded |= options - _CONNECTION_OPTIONS
    return None


def _take_expect(request: Request, value: bytes) -> HTTPError | None:
    if value.strip().lower() != b"100-continue":
        return HTTPError(417, "expectation_failed", "Only `Expect: 100-continue` is understood.")
    request.expects_continue = True
    return None


def _take_host(request: Request, value: bytes) -> HTTPError | None:
    if request.has_host:
        return HTTPError(400, "duplicate_host", "The request has more than one Host header.")
    request.has_host = True
    return None


def _take_session(request: Request, value: bytes) -> HTTPError | None:
    session = value.strip().decode("latin-1")
    if len(session) > MAX_SESSION_CHARS:
        return HTTPError(400, "bad_session_id", f"X-Session-ID is longer than {MAX_SESSION_CHARS} characters.")
    request.session = session or None
    return None


def _take_min_version(request: Request, value: bytes) -> HTTPError | None:
    request.min_version = value.strip()
    return None


_TAKERS: dict[bytes, Callable[[Request, bytes], HTTPError | None]] = {
    b"content-length": _take_length,
    b"transfer-encoding": _take_coding,
    b"connection": _take_connection,
    b"expect": _take_expect,
    b"host": _take_host,
    b"x-session-id": _take_session,
    b"x-min-policy-version": _take_min_version,
}
