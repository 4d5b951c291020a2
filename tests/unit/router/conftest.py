"""The router's unit tests run on uvloop, as the router does, and on asyncio's own loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Both loops; the other folders keep their default."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
