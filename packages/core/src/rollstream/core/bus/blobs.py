"""Spilling: arrays that would push a record over the limit become content-addressed blobs, written first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from rollstream.core.wire import Array, Record, digest, encode

RECORD_LIMIT = 512 * 1024
"""Bytes of a record with headers; NATS closes the client for ever above max_payload."""

CHUNK = 256 * 1024
"""Bytes of a blob message."""

_HEADROOM = 4 * 1024
_WORTH_SPILLING = 1024

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

    The largest arrays go first. Raises ``ValueError`` when the record is too large without any array.
    """
    blobs: dict[str, bytes] = {}
    data = encode(record)
    if len(data) <= RECORD_LIMIT - _HEADROOM:
        return record, data, blobs
    sizes = sorted({len(array.data) for array in arrays_of(record)}, reverse=True)
    for size in sizes:
        if size < _WORTH_SPILLING:
            break

        def move(array: Array, least: int = size) -> Array:
            if len(array.data) < least:
                return array
            name = digest(array.data)
            blobs[name] = array.data
            return Array(dtype=array.dtype, shape=array.shape, blob=name)

        spilled: RecordT = map_arrays(record, move)
        data = encode(spilled)
        if len(data) <= RECORD_LIMIT - _HEADROOM:
            return spilled, data, blobs
    raise ValueError(f"a {type(record).__name__} of {len(data)} bytes does not fit a message of {RECORD_LIMIT} bytes")


def chunks(data: bytes) -> list[bytes]:
    """``data`` in pieces of at most :data:`CHUNK` bytes; one empty piece for no data."""
    return [data[start : start + CHUNK] for start in range(0, len(data), CHUNK)] or [b""]
