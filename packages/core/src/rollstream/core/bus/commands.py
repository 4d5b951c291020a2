"""Commands: request/reply between the CLI and components. Lost ones are asked again; nothing durable rides on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec
import nats.errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from rollstream.core.errors import RollstreamError

if TYPE_CHECKING:
    from rollstream.core.bus.connection import Bus

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class CommandFailed(RollstreamError):
    """The component refused, failed or did not answer in time."""


class Commands:
    """Commands of one run, as JSON objects."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def request(self, component: str, name: str, payload: dict[str, Any], timeout: float = 5.0) -> dict[str, Any]:
        """Ask ``component`` to do ``name``; raises :class:`CommandFailed`."""
        subject = self._bus.subjects.command(component, name)
        try:
            message = await self._bus.client.request(subject, msgspec.json.encode(payload), timeout=min(timeout, 5.0))
        except (nats.errors.Error, TimeoutError) as error:
            raise CommandFailed(
                f"{component} did not answer {name!r}", hint="is it running? see `rollstream status`"
            ) from error
        answer: dict[str, Any] = msgspec.json.decode(message.data, type=dict[str, Any])
        if "error" in answer:
            raise CommandFailed(f"{component} refused {name!r}: {answer['error']}")
        return answer

    async def serve(self, component: str, handlers: dict[str, Handler]) -> list[Subscription]:
        """Answer commands until the returned subscriptions are dropped."""

        def answering(handler: Handler) -> Callable[[Msg], Awaitable[None]]:
            async def answer(message: Msg) -> None:
                try:
                    reply = await handler(msgspec.json.decode(message.data or b"{}", type=dict[str, Any]))
                except Exception as error:
                    reply = {"error": str(error) or type(error).__name__}
                await message.respond(msgspec.json.encode(reply))

            return answer

        return [
            await self._bus.client.subscribe(self._bus.subjects.command(component, name), cb=answering(handler))
            for name, handler in handlers.items()
        ]
