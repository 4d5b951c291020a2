"""Which replica takes a request: pure parts of the policy ``sticky_least_loaded`` and of the version floor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rollstream.router.errors import HTTPError
from rollstream.router.view import Replica, View


@dataclass(frozen=True, slots=True)
class Floor:
    """The oldest policy that may answer. ``timeline`` None takes any timeline."""

    timeline: int | None
    version: int

    def admits(self, replica: Replica) -> bool:
        """A later timeline admits whatever its version: it forked from the run that the floor speaks of."""
        if self.timeline is None:
            return replica.version >= self.version
        return replica.policy >= (self.timeline, self.version)

    def __str__(self) -> str:
        return f"{self.version}" if self.timeline is None else f"{self.timeline}:{self.version}"


def parse_floor(value: bytes | None) -> Floor | None:
    """``<timeline>:<version>`` or a plain version, both non-negative integers.

    Raises:
        HTTPError: 400 for anything else.
    """
    if value is None:
        return None
    numbers = value.split(b":")
    if len(numbers) > 2 or not all(n.isdigit() and len(n) <= 18 for n in numbers):
        shown = value[:40].decode("latin-1")
        message = f"X-Min-Policy-Version is {shown!r}; it must be <timeline>:<version> or <version>, for example 0:12."
        raise HTTPError(400, "bad_min_policy_version", message)
    if len(numbers) == 1:
        return Floor(None, int(numbers[0]))
    return Floor(int(numbers[0]), int(numbers[1]))


@dataclass(slots=True)
class Wish:
    """What one request asks of its replica, and what it has met so far.

    ``failed`` maps a replica to the view generation in which it failed this request: one that has left and become ready
    again since then is tried again.
    """

    session: str | None
    floor: Floor | None
    failed: dict[str, int] = field(default_factory=dict)

    def admits(self, replica: Replica) -> bool:
        """Whether the replica is fresh enough and has not failed this request."""
        failed = self.failed.get(replica.id)
        if failed is not None and replica.since <= failed:
            return False
        return self.floor is None or self.floor.admits(replica)

    def candidates(self, view: View) -> list[Replica]:
        """Ready replicas that may take this request."""
        if self.floor is None and not self.failed:
            return list(view.ready.values())
        return [replica for replica in view.ready.values() if self.admits(replica)]

    def why_none(self, view: View) -> str:
        """Why ``candidates`` is empty, as a sentence."""
        if not view.leases:
            return "No inference replica is registered."
        if not view.ready:
            states = ", ".join(f"{lease.id} is {lease.state}" for lease in view.leases[:8])
            return f"No inference replica is ready ({states})."
        if self.floor is not None and not any(self.floor.admits(replica) for replica in view.ready.values()):
            newest = max(replica.policy for replica in view.ready.values())
            have = f"the newest is {newest[0]}:{newest[1]}"
            return f"No ready replica holds policy version {self.floor} or newer; {have}."
        return "Every ready replica failed this request."


def least_loaded(candidates: Iterable[Replica], loads: Mapping[str, int], turns: Mapping[str, int]) -> Replica:
    """The candidate with the fewest open requests; ties go to the one whose last turn is longest ago, then by id."""
    return min(candidates, key=lambda r: (loads.get(r.id, 0), turns.get(r.id, 0), r.id))


class Bindings:
    """Where this router has last sent each session, the most recent ``size`` of them.

    Not the truth, which is in Redis: the hint that keeps sessions in place while Redis is away and after it lost
    its data.
    """

    def __init__(self, size: int = 65_536) -> None:
        self._size = size
        self._replicas: OrderedDict[str, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, session: str) -> str | None:
        """Replica id of the session, if it is known."""
        return self._replicas.get(session)

    def bind(self, session: str, replica: str) -> None:
        """Remembers a choice."""
        self._replicas[session] = replica
        self._replicas.move_to_end(session)
        if len(self._replicas) > self._size:
            self._replicas.popitem(last=False)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._replicas.pop(session, None)
