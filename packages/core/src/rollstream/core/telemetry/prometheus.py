"""A service's Prometheus endpoint."""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rollstream.core.config import MetricsServerConfig
from rollstream.core.errors import UsageError


class PrometheusServer:
    """Serves GET /metrics of one registry from the event loop: ``async with PrometheusServer(config, registry) as it``.

    ``it.address`` is "http://host:port" while it runs, "" when it is turned off. A taken port raises
    :class:`UsageError`.
    """

    def __init__(self, config: MetricsServerConfig, registry: CollectorRegistry) -> None:
        self._config = config
        self._registry = registry
        self._server: asyncio.Server | None = None
        self.address = ""

    async def __aenter__(self) -> PrometheusServer:
        if self._config.enabled:
            try:
                self._server = await asyncio.start_server(self._serve, self._config.host, self._config.port)
            except OSError as error:
                raise UsageError(
                    f"cannot serve metrics on {self._config.host}:{self._config.port}: {error.strerror}",
                    hint="choose another --metrics-server.port, 0 lets the OS choose",
                ) from error
            host, port = self._server.sockets[0].getsockname()[:2]
            self.address = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5.0):
                head = await reader.readuntil(b"\r\n\r\n")
            found = head.startswith((b"GET /metrics ", b"GET /metrics?"))
            body = generate_latest(self._registry) if found else b"not found: GET /metrics\n"
            kind = CONTENT_TYPE_LATEST if found else "text/plain"
            status = "200 OK" if found else "404 Not Found"
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            async with asyncio.timeout(5.0):
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
            pass  # a scraper that went away is no event
        finally:
            writer.close()
