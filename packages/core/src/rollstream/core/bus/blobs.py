"""Spilling: arrays that would push a record over the limit become content-addressed blobs, written first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollstream.core.bus.errors import RecordTooLarge
from rollstream.core.wire import Array, Record, digest, encode

RECORD_LIMIT = 512 * 1024
"""Bytes of a record with headers; NATS closes the client for ever above max_payload."""

CHUNK = 256 * 1024
"""Bytes of a blob message."""

IN_FLIGHT = 32
"""Blob messages on their way at once: 8 MiB at most."""

_HEADROOM = 4 * 1024
_WORTH_SPILLING = 128
"""Bytes of an array below which its reference (about 75 bytes) would hardly save anything."""

RecordT = TypeVar("RecordT", bound=Record)


def map_arrays(value: Any, change: Callable[[Array], Array]) -> Any:
    """A copy of ``value`` (structs, tuples, dicts) with every :class:`Array` replaced by ``change(array)``."""
    if isinstance(value, Array):
        return change(value)
    if isinstance(value, msgspec.Struct):
        changed = {
            name: new
            for name in value.__struct_fields__
            if (new := map_arrays(old := getattr(value, name), change)) is not old
        }
        return msgspec.structs.replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        items = tuple(map_arrays(item, change) for item in value)
        return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
    if isinstance(value, dict):
        mapped = {key: map_arrays(item, change) for key, item in value.items()}
        return mapped if any(mapped[key] is not value[key] for key in value) else value
    return value


def arrays_of(value: Any) -> list[Array]:
    """Every :class:`Array` inside ``value``, in field order."""
    found: list[Array] = []

    def note(array: Array) -> Array:
        found.append(array)
        return array

    map_arrays(value, note)
    return found


def spill(record: RecordT) -> tuple[RecordT, bytes, dict[str, bytes]]:
    """``record`` made to fit one message: (record, its bytes, blobs {sha256 → bytes} to write before it).

    The largest arrays go, as few as will do. Raises :class:`RecordTooLarge` when none are left to go.
    """
    data = encode(record)
    if _fits(data):
        return record, data, {}
    sizes = sorted({size for array in arrays_of(record) if (size := len(array.data)) >= _WORTH_SPILLING}, reverse=True)
    names: dict[bytes, str] = {}
    # Bisection: a record is encoded a dozen times, not once for every size of an array.
    few, all_of_them = 0, len(sizes) - 1
    while few < all_of_them:
        middle = (few + all_of_them) // 2
        if _fits(encode(_without(record, sizes[middle], names))):
            all_of_them = middle
        else:
            few = middle + 1
    if sizes:
        least = sizes[few]
        record = _without(record, least, names)
        data = encode(record)
        if _fits(data):
            return record, data, {name: held for held, name in names.items() if len(held) >= least}
    raise RecordTooLarge(
        f"a {type(record).__name__} of {len(data)} bytes does not fit a message of {RECORD_LIMIT} bytes, "
        f"even with its {len(names)} arrays elsewhere",
        hint="a batch: fewer rollouts (orchestrator.groups_per_batch, group_size); a rollout: shorter messages",
    )


def _fits(data: bytes) -> bool:
    return len(data) <= RECORD_LIMIT - _HEADROOM


def _without(record: RecordT, least: int, names: dict[bytes, str]) -> RecordT:
    """``record`` with every array of ``least`` bytes or more as a reference; ``names`` remembers the digests."""

    def move(array: Array) -> Array:
        if len(array.data) < least:
            return array
        name = names.get(array.data)
        if name is None:
            name = names[array.data] = digest(array.data)
        return Array(dtype=array.dtype, shape=array.shape, blob=name)

    without: RecordT = map_arrays(record, move)
    return without


def chunks(data: bytes) -> list[bytes]:
    """``data`` in pieces of at most :data:`CHUNK` bytes; one empty piece for no data."""
    return [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)] or [b""]
