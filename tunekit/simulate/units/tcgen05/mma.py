"""tcgen05.mma and tcgen05.mma.ws (PTX ISA 9.7.16.10.9): D = A B + D, by one thread, in the background."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.machine.decode import AddressOf, Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.matrix import descriptor_sm100
from tunekit.simulate.matrix.descriptor_sm100 import DescriptorError
from tunekit.simulate.matrix.layout import SWIZZLE_128B_BASE_32B, Place
from tunekit.simulate.ptx.module import Address, Immediate, Instruction, Vector
from tunekit.simulate.units.tcgen05 import instruction_descriptor, zero_columns
from tunekit.simulate.units.tcgen05.data_path import data_path
from tunekit.simulate.units.tcgen05.instruction_descriptor import KINDS, Kind, Shape
from tunekit.simulate.units.tcgen05.multiply import Multiplication, Scaling
from tunekit.simulate.units.tcgen05.pipe import members, submit
from tunekit.simulate.units.tcgen05.state import WarpTensor, group_of

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp


@dataclass(frozen=True)
class _Operands:
    """The slots of one instruction."""

    d: AddressOf
    a_tensor: AddressOf | None
    a_shared: int
    b: int
    shape: int
    disabled: tuple[int, ...]
    enable: tuple[int, bool]
    scale_d: int
    zero_mask: int
    scale_a: AddressOf | None
    scale_b: AddressOf | None


@instruction("tcgen05.mma")
def mma(i: Instruction, d: Decoder) -> Step:
    for refused, why in (("sp", "sparse matrices"), ("ashift", "the shift of A's rows")):
        if refused in i.modifiers:
            raise d.unsupported(f"{why} are not modelled" if refused == "sp" else f"{why} is not modelled")
    group = group_of(i)
    kind = KINDS[next(m for m in i.modifiers if m.startswith("kind::"))[6:]]
    weight_stationary = "ws" in i.modifiers
    blocks = _blocks(i, d, kind) if kind.scaled else 0
    operands = _operands(i, d, kind, weight_stationary)

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        # One thread issues; where several execute it, each issues an operation of its own.
        for lane in lanes.indices:
            try:
                operation = _issue(w, i, int(lane), operands, kind, group, weight_stationary, blocks)
            except DescriptorError as error:
                w.fault(FaultKind.DESCRIPTOR, str(error))
                continue
            w.part(WarpTensor).rely()
            submit(w, i, operation.ctas, operation.run)
        return None

    return step


def _operands(i: Instruction, d: Decoder, kind: Kind, weight_stationary: bool) -> _Operands:
    target, a, b, shape, *rest = i.operands
    scale_a = scale_b = None
    disabled: tuple[int, ...] = ()
    if kind.scaled:
        scale_a, scale_b = d.address(rest[0]), d.address(rest[1])
        rest = rest[2:]
    elif isinstance(rest[0], Vector):
        disabled = d.reads_vector(rest[0], "b32")
        rest = rest[1:]
    enable = d.predicate(rest[0])
    scale_d, zero_mask = 0, -1
    if len(rest) > 1:
        if weight_stationary:
            zero_mask = d.read(rest[1], "b64")
        elif isinstance(rest[1], Immediate) and kind.name in ("f16", "tf32") and 0 <= rest[1].value <= 15:
            scale_d = rest[1].value
        else:
            raise d.unsupported("scale-input-d is an immediate of 0 to 15, for kind::f16 and kind::tf32")
    tensor_a = isinstance(a, Address)
    return _Operands(
        d=d.address(target),
        a_tensor=d.address(a) if tensor_a else None,
        a_shared=-1 if tensor_a else d.read(a, "b64"),
        b=d.read(b, "b64"),
        shape=d.read(shape, "b32"),
        disabled=disabled,
        enable=enable,
        scale_d=scale_d,
        zero_mask=zero_mask,
        scale_a=scale_a,
        scale_b=scale_b,
    )


def _blocks(i: Instruction, d: Decoder, kind: Kind) -> int:
    """Scale factors for each row of A along K (9.7.16.10.7.1)."""
    named = {"scale_vec::1X": 1, "scale_vec::2X": 2, "scale_vec::4X": 4, "block16": 4}
    named["block32"] = 1 if kind.name == "mxf8f6f4" else 2
    given = [named[m] for m in i.modifiers if m in named]
    allowed = {"mxf8f6f4": (1,), "mxf4": (2,), "mxf4nvf4": (2, 4)}[kind.name]
    if not given and kind.name == "mxf4nvf4":
        raise d.unsupported("kind::mxf4nvf4 needs its scale vector size")
    blocks = given[0] if given else allowed[0]
    if blocks not in allowed:
        raise d.unsupported(f"kind::{kind.name} has no scale vector of {blocks}X")
    return blocks


def _issue(
    w: Warp, i: Instruction, lane: int, o: _Operands, kind: Kind, group: int, weight_stationary: bool, blocks: int
) -> Multiplication:
    """The operation that `lane` issues, all its operands read and its descriptors checked."""
    ctas = members(w, i, group)
    one = Lanes.of(1 << lane)
    shape = instruction_descriptor.decode(int(w.u32[o.shape][lane]), kind, group, weight_stationary)
    path = data_path(shape.m, group, weight_stationary)
    a_place = None if o.a_tensor else _matrix(int(w.u64[o.a_shared][lane]), shape, "A")
    if o.a_tensor is not None and shape.a_major == "mn":
        raise DescriptorError("transpose A", "A in tensor memory can't be transposed")
    zero: NDArray[np.bool_] | None = None
    shift = 0
    if o.zero_mask >= 0:
        zero, shift = zero_columns.decode(int(w.u64[o.zero_mask][lane]), shape.m, shape.n, shape.max_shift)
    enabled = bool(w.pred[o.enable[0]][lane]) != o.enable[1]
    unit = w.part(WarpTensor)
    return Multiplication(
        warp=w,
        instruction=i,
        ctas=ctas,
        shape=shape,
        path=path,
        d=o.d.first(w, one) & 0xFFFFFFFF,
        a=o.a_tensor.first(w, one) & 0xFFFFFFFF if o.a_tensor is not None else a_place,
        b=_matrix(int(w.u64[o.b][lane]), shape, "B"),
        accumulate=enabled,
        scale_d=o.scale_d,
        kept=_disabled(w, lane, o.disabled, group),
        zero=zero,
        shift=shift,
        scaling=_scaling(w, one, o, shape, blocks) if kind.scaled else None,
        shared=w.async_access(unit.pipe),
        tensor=unit.access(unit.pipe, i),
    )


def _matrix(bits: int, shape: Shape, name: str) -> Place:
    """The matrix descriptor of A or B, checked against the instruction (9.7.16.10.3)."""
    try:
        place = descriptor_sm100.decode(bits)
    except DescriptorError as error:
        raise DescriptorError(f"matrix descriptor of {name}: {error.field}", str(error).split(": ", 1)[1]) from error
    major = shape.a_major if name == "A" else shape.b_major
    wide = place.swizzle is SWIZZLE_128B_BASE_32B
    if major == "mn" and wide != (shape.kind.name == "tf32"):
        word = "needs" if shape.kind.name == "tf32" else "can't have"
        raise DescriptorError(
            f"matrix descriptor of {name}: swizzling mode", f"kind::{shape.kind.name} transposed {word} 32-byte atoms"
        )
    return place


def _disabled(w: Warp, lane: int, slots: tuple[int, ...], group: int) -> NDArray[np.bool_] | None:
    """bool[128 * group]: lanes of D that keep what they hold; None if there are none."""
    if not slots:
        return None
    if len(slots) != 4 * group:
        raise DescriptorError("disable-output-lane", f"{len(slots)} words, must be {4 * group} for cta_group::{group}")
    words = np.array([w.u32[slot][lane] for slot in slots], dtype=np.uint32)
    if not words.any():
        return None
    return np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)


def _scaling(w: Warp, one: Lanes, o: _Operands, shape: Shape, blocks: int) -> Scaling:
    if o.scale_a is None or o.scale_b is None:
        raise DescriptorError("scale factors", "missing")
    allowed = {1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[blocks]
    for name, number in (("A", shape.scale_a_id), ("B", shape.scale_b_id)):
        if number not in allowed:
            raise DescriptorError(f"matrix {name} scale factor data ID", f"{number} is not one of {allowed}")
    if shape.scale_type == "ue4m3" and blocks != 4:
        raise DescriptorError("scale matrix type", "ue4m3 needs scale_vec::4X")
    return Scaling(o.scale_a.first(w, one) & 0xFFFFFFFF, o.scale_b.first(w, one) & 0xFFFFFFFF, blocks, shape.scale_type)
