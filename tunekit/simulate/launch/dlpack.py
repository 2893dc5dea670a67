"""Host memory that says it lies on a GPU: DLPack capsules built by hand.

No array library makes such a tensor without a GPU, and numpy lacks the narrow dtypes. Layouts: dlpack.h 1.3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunekit.errors import UserError

CUDA_DEVICE = 2  # kDLCUDA
# Per dtype, by torch's name where it has one: DLDataTypeCode, bits of a lane, lanes.
DTYPES: dict[str, tuple[int, int, int]] = {
    "bool": (6, 8, 1),
    **{f"int{bits}": (0, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits, 1) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits, 1) for bits in (16, 32, 64)},
    "bfloat16": (4, 16, 1),
    "float8_e4m3fn": (10, 8, 1),
    "float8_e5m2": (12, 8, 1),
    "float8_e8m0fnu": (14, 8, 1),
    "float6_e2m3fn": (15, 6, 1),
    "float6_e3m2fn": (16, 6, 1),
    "float4_e2m1fn": (17, 4, 1),
    "float4_e2m1fn_x2": (17, 4, 2),
}


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _ManagedTensor(ctypes.Structure):
    """DLManagedTensor. Without a deleter: the memory is the buffer's, this structure the capsule maker's."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def dtype_bits(name: str) -> int:
    """The bits of one element.

    Raises:
        UserError: an unknown dtype.
    """
    if name not in DTYPES:
        raise UserError(f"unknown dtype '{name}' (known: {', '.join(DTYPES)})")
    _, bits, lanes = DTYPES[name]
    return bits * lanes


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor at `address`, on device 0 for all that DLPack tells. Must outlive what it is passed to.

    `strides` are in elements; empty means row-major. `dtype` is a name of `DTYPES`.
    """

    address: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        dtype_bits(self.dtype)
        code, bits, lanes = DTYPES[self.dtype]
        numbers = ctypes.c_int64 * len(self.shape)
        tensor = _Tensor(self.address, CUDA_DEVICE, 0, len(self.shape), code, bits, lanes)
        tensor.shape = numbers(*self.shape)
        tensor.strides = numbers(*(self.strides or contiguous(self.shape)))
        object.__setattr__(self, "_managed", _ManagedTensor(tensor, None, None))

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA_DEVICE, 0

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        # The name must live as long as the capsule: a literal of this module does.
        return new(ctypes.addressof(object.__getattribute__(self, "_managed")), _CAPSULE_NAME, None)


_CAPSULE_NAME = b"dltensor"
