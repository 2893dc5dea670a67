"""What a tensor map says: a tensor in global memory and the box of it that one copy moves (PTX ISA 5.5)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tunekit.errors import TunekitError
from tunekit.simulate.tma.swizzle import Swizzle


class TensorMapError(TunekitError):
    """Bytes that are no tensor map, or a copy that a map does not allow."""


class NotModelled(TensorMapError):
    """A tensor map that the hardware takes and the simulator does not: refused, not a fault."""


class Element(enum.Enum):
    """Element types: (driver's ``CUtensorMapDataType``, code in the descriptor, TF32 bit, bits in global memory)."""

    U8 = (0, 0, 0, 8)
    U16 = (1, 1, 0, 16)
    U32 = (2, 2, 0, 32)
    S32 = (3, 3, 0, 32)
    U64 = (4, 4, 0, 64)
    S64 = (5, 5, 0, 64)
    F16 = (6, 6, 0, 16)
    F32 = (7, 7, 0, 32)
    F64 = (8, 9, 0, 64)
    BF16 = (9, 10, 0, 16)
    F32_FTZ = (10, 8, 0, 32)
    TF32 = (11, 7, 1, 32)
    TF32_FTZ = (12, 8, 1, 32)
    # Sixteen elements packed, in shared memory followed by 0, 8 and 4 bytes of padding.
    B4X16 = (13, 11, 0, 4)
    B4X16_P64 = (14, 12, 0, 4)
    B6X16_P32 = (15, 13, 0, 6)

    def __init__(self, driver: int, code: int, tf32: int, bits: int) -> None:
        self.driver = driver
        self.code = code
        self.tf32 = tf32
        self.bits = bits

    @property
    def packed(self) -> bool:
        """Several elements share bytes."""
        return self.bits < 8

    @property
    def padded(self) -> bool:
        """Copies into shared memory leave gaps after each sixteen elements."""
        return self in (Element.B4X16_P64, Element.B6X16_P32)

    @property
    def floating(self) -> bool:
        """Out-of-bounds elements can be NaN."""
        return self.name.startswith(("F", "BF", "TF"))


@dataclass(frozen=True)
class Im2col:
    """The pixel box of the im2col modes (PTX ISA 5.5.5): its corners along W, H, D as far as the rank goes."""

    lower: tuple[int, ...]  # added to 0
    upper: tuple[int, ...]  # added to size - 1
    pixels: int  # rows of one copy


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box of it that one tiled copy moves. Dimension 0 is the contiguous one.

    In im2col modes, only the first number of `box` counts: channels.

    `sizes`, `box` (elements) and `element_strides` have `rank` entries; `strides` (bytes) has one less: dimension 0
    has none. With an element stride e a box of b elements holds every e-th, ceil(b / e) of them.
    """

    address: int
    element: Element
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: Swizzle = Swizzle.NONE
    interleave_bytes: int = 0
    l2_promotion_bytes: int = 0
    nan_fill: bool = False
    im2col: Im2col | None = None

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def extent(self) -> tuple[int, ...]:
        """Elements that a copy moves along each dimension: the box over the element stride, rounded up."""
        # Without interleave, dimension 0 is never strided (cuTensorMapEncodeTiled, elementStrides).
        strides = (1, *self.element_strides[1:]) if not self.interleave_bytes else self.element_strides
        return tuple(-(-box // max(stride, 1)) for box, stride in zip(self.box, strides, strict=True))

    @property
    def row_bytes(self) -> int:
        """Bytes of the box along dimension 0, as they lie in global memory."""
        return self.extent[0] * self.element.bits // 8

    @property
    def rows(self) -> int:
        """Rows of the box: the product of its other dimensions, or an im2col box's pixels."""
        count = self.im2col.pixels if self.im2col else 1
        for extent in self.extent[1:]:
            count *= extent
        return count

    @property
    def transaction_bytes(self) -> int:
        """What a copy of the whole box adds to the mbarrier's transaction count, elements out of bounds included.

        The padding of packed types does not count: their bytes are those of global memory.
        """
        return self.rows * self.row_bytes

    @property
    def span_bytes(self) -> int:
        """From the first byte of the tensor to behind its last."""
        steps = sum((size - 1) * stride for size, stride in zip(self.sizes[1:], self.strides, strict=True))
        return steps + -(-self.sizes[0] * self.element.bits // 8)

    def __str__(self) -> str:
        fields = [f"{self.element.name.lower()} {list(self.sizes)} at {self.address:#x}", f"box {list(self.box)}"]
        if self.strides:
            fields.append(f"byte strides {list(self.strides)}")
        if any(stride != 1 for stride in self.element_strides):
            fields.append(f"element strides {list(self.element_strides)}")
        if self.swizzle:
            fields.append(f"swizzle {self.swizzle.name}")
        if self.interleave_bytes:
            fields.append(f"interleave {self.interleave_bytes} B")
        if self.im2col:
            fields.append(f"im2col of {self.im2col.pixels} pixels, {self.im2col.lower} to {self.im2col.upper}")
        if self.nan_fill:
            fields.append("NaN outside")
        return "tensor map(" + ", ".join(fields) + ")"
