"""One-dimensional numeric arrays as pydantic fields.

An array field accepts a sequence of numbers (JSON), raw little-endian bytes (msgpack) or a NumPy array, and always
holds a read-only, one-dimensional, finite NumPy array of the declared dtype. A dump in python mode keeps the array, one
in JSON mode makes it a list. float32 values survive a JSON round trip exactly. NumPy is imported with the first array,
because a client of the HTTP API shares this package and is installed without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import GetCoreSchemaHandler
from pydantic_core import core_schema

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class ArrayField:
    """Makes an ndarray a pydantic field. `dtype` is a little-endian NumPy type string such as `"<f4"`."""

    dtype: str

    def validate(self, value: Any) -> NDArray[Any]:
        import numpy as np

        dtype = np.dtype(self.dtype)
        if isinstance(value, bytes):
            if len(value) % dtype.itemsize:
                raise ValueError(f"{len(value)} bytes are not a whole number of {dtype.name} values")
            array = np.frombuffer(value, dtype)
        elif isinstance(value, (list, tuple, np.ndarray)):
            array = self._from_numbers(value, dtype)
        else:
            raise ValueError(f"expected a list of numbers, got {type(value).__name__}")
        if dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("every value must be finite, got NaN or infinity")
        if array.flags.writeable:
            array = array.copy()
            array.flags.writeable = False
        return array

    @staticmethod
    def _from_numbers(value: Any, dtype: np.dtype[Any]) -> NDArray[Any]:
        import numpy as np

        try:
            wide = np.asarray(value, dtype=None if len(value) else dtype)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"expected a flat list of numbers: {error}") from None
        if wide.ndim != 1 or wide.dtype.kind not in "iuf":
            raise ValueError(f"expected a flat list of numbers, got shape {wide.shape} of {wide.dtype.name}")
        if dtype.kind == "i":
            if wide.dtype.kind == "f":
                raise ValueError(f"expected integers, got {wide.dtype.name}")
            info = np.iinfo(dtype)
            if wide.size and (wide.min() < info.min or wide.max() > info.max):
                raise ValueError(f"values must lie in [{info.min}, {info.max}], got {wide.min()}..{wide.max()}")
        with np.errstate(over="ignore"):
            return wide.astype(dtype, copy=False)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda a: a.tolist(), when_used="json"),
        )


if TYPE_CHECKING:
    Float32Array: TypeAlias = NDArray[np.float32]
    Int32Array: TypeAlias = NDArray[np.int32]
else:
    Float32Array = Annotated[Any, ArrayField("<f4")]
    Int32Array = Annotated[Any, ArrayField("<i4")]
