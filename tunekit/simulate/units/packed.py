"""Two single-precision values in a 64-bit register: add, sub, mul and fma .f32x2 (PTX ISA 9.7.3, sm_100 and later)."""

from __future__ import annotations

from tunekit.simulate.machine.decode import Decoder, Step
from tunekit.simulate.numbers.ieee import ROUNDINGS, add_f32, fma_f32, mul_f32
from tunekit.simulate.numbers.lanewise import Modifiers, straight, typed
from tunekit.simulate.ptx.module import Instruction


@typed("add sub mul fma", "f32x2")
def packed(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    m.last()
    ftz = m.take("ftz")
    rounding = m.choose(ROUNDINGS) if i.opcode == "fma" else m.choose(ROUNDINGS, "rn")
    m.end()
    if i.opcode == "fma":
        return straight(i, d, fma_f32(rounding, ftz), "f32x2", 3)
    kernel = mul_f32(rounding, ftz) if i.opcode == "mul" else add_f32(i.opcode == "sub", rounding, ftz)
    return straight(i, d, kernel, "f32x2", 2)
