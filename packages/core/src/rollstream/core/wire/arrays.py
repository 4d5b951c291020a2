"""Arrays on the wire: little-endian numpy bytes with dtype and shape, never lists."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt


class Array(msgspec.Struct, frozen=True, omit_defaults=True):
    """One array, inline (``data``) or spilled to a content-addressed blob (``blob``).

    Invariants: ``dtype`` is a numpy type string of a little-endian or single-byte type (``<f4``, ``<i4``, ``|b1``);
    the bytes are C-contiguous and ``prod(shape) * itemsize`` long. Exactly one of ``data`` and ``blob`` speaks:
    an array whose ``blob`` is set has been spilled and must be resolved through the bus before :meth:`numpy`.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes = b""
    blob: str | None = None

    @classmethod
    def of(cls, values: npt.ArrayLike, dtype: npt.DTypeLike | None = None) -> Array:
        """Copy ``values`` (any shape) into wire form; refuses object and complex types with ``TypeError``."""
        array = np.ascontiguousarray(np.asarray(values, dtype=dtype))
        if array.dtype.kind not in "biuf":
            raise TypeError(f"an array of dtype {array.dtype} cannot travel; use bool, int, uint or float")
        little = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(dtype=little.dtype.str, shape=little.shape, data=little.tobytes())

    @property
    def nbytes(self) -> int:
        """Size in bytes that ``dtype`` and ``shape`` promise."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count * np.dtype(self.dtype).itemsize

    def numpy(self) -> npt.NDArray[Any]:
        """The values as a read-only view; raises ``ValueError`` when spilled or when the bytes do not fit."""
        if self.blob is not None and not self.data:
            raise ValueError(
                f"array {self.dtype}{self.shape} lies in blob {self.blob}: resolve it through the bus first"
            )
        if len(self.data) != self.nbytes:
            raise ValueError(
                f"array {self.dtype}{self.shape} wants {self.nbytes} bytes, the record holds {len(self.data)}"
            )
        return np.frombuffer(self.data, dtype=np.dtype(self.dtype)).reshape(self.shape)
