"""What a request may cost: sizes in bytes, times in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from rollstream.core.config.serving import RouterConfig


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one exchange. The defaults suit long generations; the configuration sets the ones that users meet."""

    body_bytes: int = 64 * 1024 * 1024
    """Largest request body (413 above)."""

    head_bytes: int = 64 * 1024
    """Largest request head, URL included (431 above)."""

    head_seconds: float = 10.0
    """From a request's first byte to the end of its head (408 above)."""

    body_seconds: float = 30.0
    """Between two pieces of a request body (408 above)."""

    idle_seconds: float = 75.0
    """A client connection without a request is closed after this."""

    answer_seconds: float = 600.0
    """From a request's last byte to the answer's first, and between two pieces of the answer (504 above)."""

    stall_seconds: float = 120.0
    """A client that reads nothing of its answer for this long is cut off."""

    linger_seconds: float = 1.0
    """After a refusal the rest of the request is read and dropped for this long, so that the client sees the reason."""

    connect_seconds: float = 5.0
    """To open a connection to a replica."""

    pool_idle_seconds: float = 4.0
    """An idle connection to a replica is kept this long: less than the 5 s that the engine's server keeps it."""

    pool_idle_connections: int = 256
    """Idle connections kept for each replica."""

    @classmethod
    def of(cls, config: RouterConfig) -> Limits:
        """Limits as configured."""
        return cls(body_bytes=config.max_body_bytes, answer_seconds=config.request_timeout)

    @property
    def sweep_seconds(self) -> float:
        """How often deadlines are looked at: a quarter of the shortest, one second at most."""
        shortest = min(self.head_seconds, self.body_seconds, self.answer_seconds, self.stall_seconds, self.idle_seconds)
        return min(1.0, shortest / 4)
