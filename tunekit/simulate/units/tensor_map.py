"""Changing tensor maps on the device (PTX ISA 9.7.9.28, 9.7.13.15): tensormap.replace and tensormap.cp_fenceproxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tunekit.simulate.faults import FaultKind
from tunekit.simulate.history.order import FENCED_GLOBAL
from tunekit.simulate.history.patterns import Patterns
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx import module as ptx
from tunekit.simulate.tma.descriptor import BYTES
from tunekit.simulate.tma.fields import replaced
from tunekit.simulate.tma.tensor_map import TensorMapError

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

# The strictest alignment that the manuals name for a tensor map in memory that a kernel writes.
ALIGNMENT = 64


@instruction("tensormap.replace.tile")
def replace(i: ptx.Instruction, d: Decoder) -> Step:
    """tensormap.replace.tile.field{.space}.b1024.type [map], {ordinal,} value."""
    field, *words, size, type_ = i.modifiers[2:]
    if size != "b1024" or words not in ([], ["global"], ["shared::cta"]):
        raise d.unsupported("a form other than .field{.global, .shared::cta}.b1024.type")
    space = words[0] if words else "generic"
    address = d.address(i.operands[0])
    ordinal = i.operands[1] if len(i.operands) == 3 else ptx.Immediate(0)
    if not isinstance(ordinal, ptx.Immediate):
        raise d.unsupported(f"an ordinal {ordinal}")
    number, value, wide = ordinal.value, d.read(i.operands[-1], type_), type_ == "b64"

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        for lane in lanes.indices:
            one = Lanes.of(1 << int(lane))
            at = address.of(w, one)
            data = w.load(space, at, BYTES, one, align=ALIGNMENT)
            new = int((w.u64 if wide else w.u32)[value][lane])
            try:
                changed = replaced(data.tobytes(), field, new, number)
            except TensorMapError as error:
                raise w.stop(FaultKind.TENSOR_MAP, str(error), one) from error
            w.store(space, at, np.frombuffer(changed, dtype=np.uint8)[None, :], one, align=ALIGNMENT)
        return None

    return step


@instruction("tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release")
def copy_and_fence(i: ptx.Instruction, d: Decoder) -> Step:
    """Copies a map from shared to global memory and releases it to the tensormap proxy; one copy a warp."""
    if i.modifiers[-2:] != ("sync", "aligned") or i.operands[2] != ptx.Immediate(BYTES):
        raise d.unsupported(f"a form other than .sync.aligned with a size of {BYTES}")
    target, source = d.address(i.operands[0]), d.address(i.operands[1])

    def step(w: Warp, lanes: Lanes) -> Wait | None:
        wait = w.converge(i, lanes)
        if wait is not None:
            return wait
        one = Lanes.of(1 << lanes.first)
        data = w.load("shared::cta", source.of(w, one), BYTES, one, align=ALIGNMENT)
        w.store("global", target.of(w, one), data, one, align=ALIGNMENT)
        patterns = w.part(Patterns)
        patterns.proxy_fence(FENCED_GLOBAL)
        patterns.fence("release")
        return None

    return step
