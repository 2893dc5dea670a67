"""Register fragments that no thread can hold, found in the traced IR: kernels whose back end would not come back.

A *fragment* is a tensor in registers (``make_rmem_tensor``, ``make_fragment_like``) or a value loaded from any tensor
(``TensorSSA``). Each thread has one of its own, so a whole tile in one is a tile that nobody partitioned. The back end
takes such a value apart element by element. Seconds of the whole compile for x -> exp2(x * x + x) * max over one
fragment (nvidia-cutlass-dsl 4.8.1, 2 cores, 2026-11): of Float32 512 elements 1.4, 1024 9, 1536 34, 2048 98, 8192
over 280, 16384 over 960; of BFloat16 512 1.5, 1024 7, 1536 20. It is the elements that cost, not the bytes.

The limits are the last size near ten seconds. A thread has 255 registers of four bytes: a larger fragment has spilled
to local memory anyway. The largest in the kernels of flash-attn-4 4.0.0b36 (head_dim 256) is 256 elements of Float32,
in quack 0.6.5's, CUTLASS's examples and our own attention half of that.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tunekit.backends.cutedsl.ir import bits, walk

LIMIT_ELEMENTS = 1024
LIMIT_BYTES = 4 * LIMIT_ELEMENTS

_MEMREF = re.compile(r'memref<(?P<dtype>[^,]+), rmem(?:, align<\d+>)?, "(?P<shape>[^":]+):(?P<stride>[^"]+)">')
_TENSOR = re.compile(r'"(?P<shape>[^":]+):')
_PLACE = re.compile(r'"(?P<file>[^"\n]+)":(?P<line>\d+):\d+')
# Where a vector is made that isn't computed from others.
_VECTOR_SOURCES = ("cute.memref.load_vec", "vector.broadcast", "vector.splat", "arith.constant")
_NAMES = {"f32": "Float32", "f64": "Float64", "f16": "Float16", "bf16": "BFloat16", "i32": "Int32", "i64": "Int64"}


@dataclass(frozen=True)
class Fragment:
    """A fragment as one thread has it. `shape` is CuTe's; `place` is ``file:line`` of the source, "" if not traced."""

    shape: str
    dtype: str
    elements: int
    bits: int
    place: str = ""

    @property
    def bytes(self) -> int:
        return self.elements * self.bits // 8

    @property
    def too_large(self) -> bool:
        return self.elements > LIMIT_ELEMENTS or self.bytes > LIMIT_BYTES

    def refusal(self) -> str:
        """Why it is refused, and what to do instead."""
        where = f" made at {self.place}" if self.place else ""
        return (
            f"one thread would hold a fragment {self.shape} of {self.dtype}{where}: {self.elements} elements, "
            f"{self.bytes} B, over the limit of {LIMIT_ELEMENTS} elements and {LIMIT_BYTES} B; a thread has 255 "
            "registers of 4 B, and the back end would take minutes to hours: partition the tile over the threads "
            "(a tiled MMA's partition_C and make_fragment_C, a tiled copy's partition_S and partition_D)"
        )


def fragments(module: Any) -> Iterator[Fragment]:
    """The fragments of a traced module's kernels, in program order; what isn't of a static size is left out."""
    for part in module.body.operations:
        if part.operation.name != "gpu.module":
            continue
        for op in walk(part.operation):
            found = _fragment(op)
            if found is not None:
                yield dataclasses.replace(found, place=_place(op))


def refused(module: Any) -> Fragment | None:
    """The first fragment over the limits, or None."""
    return next((fragment for fragment in fragments(module) if fragment.too_large), None)


def _fragment(op: Any) -> Fragment | None:
    if op.name == "cute.memref.alloca":
        match = _MEMREF.search(str(op.results[0].type))
        return _allocated(match["dtype"], match["shape"], match["stride"]) if match else None
    if op.name in _VECTOR_SOURCES:
        vector = op.results[0].type
        if type(vector).__name__ != "VectorType":
            return None
        elements = 1
        for size in vector.shape:
            elements *= size
        dtype = str(vector.element_type)
        tensor = _TENSOR.search(str(op.operands[0].type)) if op.name == "cute.memref.load_vec" else None
        return Fragment(tensor["shape"] if tensor else f"({elements})", _name(dtype), elements, bits(dtype))
    return None


def _allocated(dtype: str, shape: str, stride: str) -> Fragment | None:
    """A tensor in registers: it takes as many elements as its layout reaches."""
    sizes, strides = re.findall(r"[^(),]+", shape), re.findall(r"[^(),]+", stride)
    if len(sizes) != len(strides) or not all(text.isdigit() for text in (*sizes, *strides)):
        return None
    reach = sum((int(size) - 1) * int(step) for size, step in zip(sizes, strides, strict=True))
    return Fragment(shape, _name(dtype), reach + 1, bits(dtype))


def _place(op: Any) -> str:
    match = _PLACE.search(str(op.location))
    return f"{match['file']}:{match['line']}" if match else ""


def _name(dtype: str) -> str:
    return _NAMES.get(dtype, dtype)
