"""The Prometheus endpoint over real sockets."""

from __future__ import annotations

import asyncio
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from rollstream.core.config import MetricsServerConfig
from rollstream.core.errors import UsageError
from rollstream.core.telemetry import PrometheusServer

_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def registry(value: float = 3.0) -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("rollstream_test", "A figure", registry=made).set(value)
    return made


async def scrape(url: str) -> dict[str, float]:
    def fetch() -> str:
        with _direct.open(url, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return str(answer.read().decode())

    families = text_string_to_metric_families(await asyncio.to_thread(fetch))
    return {sample.name: sample.value for family in families for sample in family.samples}


async def test_it_serves_its_own_registry_on_a_port_of_the_os() -> None:
    async with (
        PrometheusServer(MetricsServerConfig(), registry(3.0)) as one,
        PrometheusServer(MetricsServerConfig(), registry(4.0)) as other,
    ):
        assert one.address != other.address and one.address.startswith("http://127.0.0.1:")
        assert await scrape(f"{one.address}/metrics") == {"rollstream_test": 3.0}
        assert await scrape(f"{other.address}/metrics?x=1") == {"rollstream_test": 4.0}
    with pytest.raises(urllib.error.URLError):
        await scrape(f"{one.address}/metrics")


async def test_other_paths_and_methods_are_not_found() -> None:
    async with PrometheusServer(MetricsServerConfig(), registry()) as server:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await scrape(f"{server.address}/secrets")


async def test_a_taken_port_is_named() -> None:
    async with PrometheusServer(MetricsServerConfig(), registry()) as server:
        port = int(server.address.rsplit(":", 1)[1])
        with pytest.raises(UsageError, match=f"127.0.0.1:{port}") as refused:
            async with PrometheusServer(MetricsServerConfig(port=port), registry()):
                pass
        assert "--metrics-server.port" in str(refused.value)


async def test_off_is_off() -> None:
    async with PrometheusServer(MetricsServerConfig(enabled=False), registry()) as server:
        assert server.address == ""


async def test_scrapers_that_misbehave_harm_no_other() -> None:
    async with PrometheusServer(MetricsServerConfig(), registry()) as server:
        host, port = server.address.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        _, gone = await asyncio.open_connection(host, int(port))
        gone.write(b"GET /metr")
        gone.close()
        reader, endless = await asyncio.open_connection(host, int(port))
        endless.write(b"x" * 100_000)
        await endless.drain()
        assert await scrape(f"{server.address}/metrics") == {"rollstream_test": 3.0}
        async with asyncio.timeout(5):
            assert await reader.read() == b"", "what is no request is hung up on"
        for _, writer in (*idle, (reader, endless)):
            writer.close()
