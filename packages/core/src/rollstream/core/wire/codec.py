"""Record ↔ bytes. Encoding is deterministic: equal records have equal bytes, hence equal digests."""

from __future__ import annotations

import hashlib
from typing import TypeVar

import msgspec

from rollstream.core.wire.records import AnyRecord, Record

RecordT = TypeVar("RecordT", bound=Record)

# "deterministic" sorts dict keys, so that a digest never depends on insertion order.
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_any_decoder = msgspec.msgpack.Decoder(AnyRecord)


class MalformedRecord(ValueError):
    """Bytes on the bus are not the record that belongs there. The message says what and where."""


def encode(value: msgspec.Struct) -> bytes:
    """MessagePack bytes of a record (or of a struct that records are made of)."""
    return _encoder.encode(value)


def decode(data: bytes, *, where: str = "record") -> AnyRecord:
    """The record in ``data``; raises :class:`MalformedRecord` naming ``where``."""
    try:
        return _any_decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise MalformedRecord(f"{where}: not a rollstream record ({error})") from error


def decode_as(kind: type[RecordT], data: bytes, *, where: str = "record") -> RecordT:
    """Like :func:`decode`, for one expected type."""
    record = decode(data, where=where)
    if not isinstance(record, kind):
        raise MalformedRecord(f"{where}: expected {kind.__name__}, found {type(record).__name__}")
    return record


def digest(data: bytes) -> str:
    """sha256 as 64 hex digits."""
    return hashlib.sha256(data).hexdigest()
