"""The instruction descriptor of tcgen05.mma (PTX ISA 9.7.16.4.2) and the shapes it may name (9.7.16.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tunekit.simulate.matrix.descriptor_sm100 import DescriptorError
from tunekit.simulate.matrix.layout import Major

_FLOATS_8_6_4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}


@dataclass(frozen=True, eq=False)
class Kind:
    """What the kinds differ in.

    element_bits: the width that an element of A or B takes in shared memory (4- and 6-bit elements of f8f6f4 lie in
    containers of 8 bits, 16 elements in 16 bytes with the padding at the end).
    """

    name: str
    element_bits: int
    types: dict[int, str]
    results: dict[int, str]
    scaled: bool = False
    type_bits_b: int = 3

    @property
    def k(self) -> int:
        """A row of A is always 32 bytes wide (dense, no K = 96)."""
        return 256 // self.element_bits


_FLOAT_RESULTS = {0: "f16", 1: "f32"}
KINDS = {
    kind.name: kind
    for kind in (
        Kind("f16", 16, {0: "f16", 1: "bf16"}, _FLOAT_RESULTS),
        Kind("tf32", 32, {2: "tf32"}, {1: "f32"}),
        Kind("f8f6f4", 8, _FLOATS_8_6_4, _FLOAT_RESULTS),
        Kind("i8", 8, {0: "u8", 1: "s8"}, {2: "s32"}),
        Kind("mxf8f6f4", 8, _FLOATS_8_6_4, {}, scaled=True),
        Kind("mxf4", 4, {1: "e2m1"}, {}, scaled=True, type_bits_b=2),
        Kind("mxf4nvf4", 4, {1: "e2m1"}, {}, scaled=True, type_bits_b=2),
    )
}


@dataclass(frozen=True)
class Shape:
    """One decoded instruction descriptor: D[m, n] (+)= A[m, k] B[k, n]."""

    kind: Kind
    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_major: Major
    b_major: Major
    negate_a: bool
    negate_b: bool
    saturate: bool = False
    max_shift: int = 0
    scale_type: str = ""
    scale_a_id: int = 0
    scale_b_id: int = 0

    @property
    def k(self) -> int:
        return self.kind.k

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k} {self.a_type} x {self.b_type} -> {self.d_type}"


def _field(bits: int, low: int, count: int) -> int:
    return (bits >> low) & ((1 << count) - 1)


def _named(bits: int, low: int, count: int, values: dict[int, str], name: str) -> str:
    value = _field(bits, low, count)
    if value not in values:
        raise DescriptorError(name, f"bits {low}-{low + count - 1} are {value}, not one of {_listed(values)}")
    return values[value]


def _listed(values: dict[int, str]) -> str:
    return ", ".join(f"{number} ({text})" for number, text in values.items())


def _zero(bits: int, low: int, count: int, name: str) -> None:
    if _field(bits, low, count):
        where = f"bit {low}" if count == 1 else f"bits {low}-{low + count - 1}"
        raise DescriptorError(name, f"{where} must be 0")


@lru_cache(maxsize=1024)
def decode(bits: int, kind: Kind, cta_group: int, weight_stationary: bool) -> Shape:
    """The descriptor's fields; DescriptorError names the first field that is wrong for this instruction."""
    shape = _scaled(bits, kind) if kind.scaled else _plain(bits, kind)
    _check_types(shape)
    _check_shape(shape, cta_group, weight_stationary)
    return shape


def _plain(bits: int, kind: Kind) -> Shape:
    _zero(bits, 0, 2, "sparsity selector")
    _zero(bits, 2, 1, "sparsity (the instruction is dense)")
    if kind.name != "i8":
        _zero(bits, 3, 1, "saturate")
    _zero(bits, 6, 1, "reserved")
    _zero(bits, 23, 1, "reserved")
    _zero(bits, 29, 1, "reserved")
    return Shape(
        kind=kind,
        m=_field(bits, 24, 5) << 4,
        n=_field(bits, 17, 6) << 3,
        a_type=_named(bits, 7, 3, kind.types, "atype"),
        b_type=_named(bits, 10, 3, kind.types, "btype"),
        d_type=_named(bits, 4, 2, kind.results, "dtype"),
        a_major="mn" if _field(bits, 15, 1) else "k",
        b_major="mn" if _field(bits, 16, 1) else "k",
        negate_a=bool(_field(bits, 13, 1)),
        negate_b=bool(_field(bits, 14, 1)),
        saturate=bool(_field(bits, 3, 1)),
        max_shift=(0, 8, 16, 32)[_field(bits, 30, 2)],
    )


def _scaled(bits: int, kind: Kind) -> Shape:
    _zero(bits, 0, 2, "reserved")
    _zero(bits, 2, 1, "sparsity (the instruction is dense)")
    _zero(bits, 3, 1, "reserved")
    _zero(bits, 6, 1, "reserved")
    _zero(bits, 24, 3, "reserved")
    scales = {0: "ue4m3", 1: "ue8m0"} if kind.name == "mxf4nvf4" else {1: "ue8m0"}
    if kind.element_bits == 4:
        _zero(bits, 12, 1, "reserved")
        _zero(bits, 31, 1, "K dimension (K = 96 is of sm_103)")
    else:
        _zero(bits, 31, 1, "reserved")
    return Shape(
        kind=kind,
        m=_field(bits, 27, 2) << 7,
        n=_field(bits, 17, 6) << 3,
        a_type=_named(bits, 7, 3, kind.types, "atype"),
        b_type=_named(bits, 10, kind.type_bits_b, kind.types, "btype"),
        d_type="f32",
        a_major="mn" if _field(bits, 15, 1) else "k",
        b_major="mn" if _field(bits, 16, 1) else "k",
        negate_a=bool(_field(bits, 13, 1)),
        negate_b=bool(_field(bits, 14, 1)),
        scale_type=_named(bits, 23, 1, scales, "scale matrix type"),
        scale_a_id=_field(bits, 29, 2),
        scale_b_id=_field(bits, 4, 2),
    )


def _check_types(shape: Shape) -> None:
    kind = shape.kind
    if kind.name == "f16" and shape.d_type == "f16" and "bf16" in (shape.a_type, shape.b_type):
        raise DescriptorError("dtype", "a result of f16 needs f16 inputs")
    if kind.name == "i8" and (shape.negate_a or shape.negate_b):
        raise DescriptorError("negate", "kind::i8 can't negate")
    for name, major, element in (("A", shape.a_major, shape.a_type), ("B", shape.b_major, shape.b_type)):
        if major == "mn" and element in ("e2m1", "e2m3", "e3m2"):
            raise DescriptorError(f"transpose {name}", f"elements of {element} can't be transposed")


def _check_shape(shape: Shape, cta_group: int, weight_stationary: bool) -> None:
    m, n, kind = shape.m, shape.n, shape.kind
    heights: tuple[int, ...]
    if weight_stationary:
        heights = (32, 64, 128)
        if n not in (64, 128, 256):
            raise DescriptorError("N", f"{n} is not one of 64, 128, 256")
    elif cta_group == 1:
        heights = (128,) if kind.scaled else (64, 128)
        step = 16 if shape.b_major == "mn" and kind.element_bits == 8 else 8
        if kind.name == "i8" and n % 16 and n not in (8, 24):
            raise DescriptorError("N", f"{n} is not one of 8, 16, 24, 32, 48 ... 256")
        if n % step or not step <= n <= 256:
            raise DescriptorError("N", f"{n} is not a multiple of {step} between {step} and 256")
    else:
        heights = (128, 256)
        step = 32 if kind.name == "i8" or (shape.b_major == "mn" and kind.element_bits == 8) else 16
        if n % step or not step <= n <= 256:
            raise DescriptorError("N", f"{n} is not a multiple of {step} between {step} and 256")
    if m not in heights:
        allowed = ", ".join(str(height) for height in heights)
        form = "tcgen05.mma.ws" if weight_stationary else f"cta_group::{cta_group}"
        raise DescriptorError("M", f"{m} is not one of {allowed} ({form}, kind::{kind.name})")


def encode(shape: Shape) -> int:
    """The descriptor of `shape`."""
    kind = shape.kind

    def number(values: dict[int, str], name: str) -> int:
        return next(value for value, text in values.items() if text == name)

    bits = (
        number(kind.types, shape.a_type) << 7
        | number(kind.types, shape.b_type) << 10
        | int(shape.negate_a) << 13
        | int(shape.negate_b) << 14
        | int(shape.a_major == "mn") << 15
        | int(shape.b_major == "mn") << 16
        | shape.n >> 3 << 17
    )
    if kind.scaled:
        scale = int(shape.scale_type == "ue8m0")
        return bits | shape.scale_b_id << 4 | scale << 23 | shape.m >> 7 << 27 | shape.scale_a_id << 29
    shift = (0, 8, 16, 32).index(shape.max_shift)
    result = number(kind.results, shape.d_type)
    return bits | int(shape.saturate) << 3 | result << 4 | shape.m >> 4 << 24 | shift << 30
