"""cvt to and from packed formats: f16x2, bf16x2 and the pairs of 8, 6 and 4 bits; cvt.pack (PTX ISA 9.7.9).

Of two inputs the first goes to the upper half. Stochastic rounding (.rs) is modelled for bf16x2, whose 16 random
bits are as wide as what is dropped; for the other formats the ISA's text leaves their place open.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tunekit.simulate.machine.decode import Decoder, Step
from tunekit.simulate.numbers.formats import FORMATS, Array, decode, encode
from tunekit.simulate.numbers.ieee import Kernel
from tunekit.simulate.numbers.lanewise import Modifiers, lanewise, operands
from tunekit.simulate.ptx.module import Instruction

HALVES = ("f16x2", "bf16x2")
BYTES = ("e4m3x2", "e5m2x2")
SMALL = (*BYTES, "e2m3x2", "e3m2x2", "e2m1x2")
FOURS = ("e4m3x4", "e5m2x4", "e2m3x4", "e3m2x4", "e2m1x4")
PACKED = (*HALVES, *SMALL, "ue8m0x2", *FOURS)


def packed(i: Instruction, d: Decoder) -> Step:
    m = Modifiers(i, d)
    from_, to = m.last(), m.last()
    format = to.removesuffix("x2")
    if to in HALVES and from_ == "f32":
        return _to_halves(i, d, m, format)
    if to == "ue8m0x2" and from_ in ("f32", "bf16x2"):
        rounding, satfinite, relu = m.choose(("rz", "rp")), m.take("satfinite"), False
    elif to in SMALL and (from_ == "f32" or (from_ == "f16x2" and to in (*BYTES, "e2m1x2"))):
        rounding, satfinite, relu = m.choose(("rn",)), m.take("satfinite"), m.take("relu")
        if not satfinite:
            raise d.unsupported("without .satfinite")
    elif (to == "f16x2" and from_ in SMALL) or (to == "bf16x2" and from_ == "ue8m0x2"):
        return _widen(i, d, m, from_.removesuffix("x2"), format)
    else:
        raise d.unsupported("this pair of types")
    m.end()
    result = ("u16", d.write(i.operands[0], "b8" if to == "e2m1x2" else "b16"))
    shift = 4 if to == "e2m1x2" else 8

    def join(high: Array, low: Array, out: Array) -> None:
        upper, lower = encode(np.stack((high, low)), format, rounding, satfinite=satfinite, relu=relu)
        out[...] = (upper.astype(np.uint16) << shift) | lower

    if from_ == "f32":
        operands(i, d, 3)
        high, low = (("f32", d.read(x, "f32")) for x in i.operands[1:])
        return lanewise(join, result, high, low)
    operands(i, d, 2)
    half = from_.removesuffix("x2")

    def split(a: Array, out: Array) -> None:
        values = decode(a, half)
        join(values[:, 1], values[:, 0], out)

    return lanewise(split, result, ("h2", d.read(i.operands[1], "b32")))


def _widen(i: Instruction, d: Decoder, m: Modifiers, format: str, half: str) -> Step:
    """Pairs to f16x2 (ue8m0x2 to bf16x2): every value of the small formats is one of the larger."""
    m.choose(("rn",))
    relu = half == "f16" and m.take("relu")
    m.end()
    operands(i, d, 2)
    shift = 4 if format == "e2m1" else 8
    mask = (1 << FORMATS[format].bits) - 1

    def kernel(a: Array, out: Array) -> None:
        for k, codes in ((0, a & mask), (1, (a >> shift) & mask)):
            out[:, k] = encode(decode(codes, format), half, relu=relu)

    source = ("u16", d.read(i.operands[1], "b8" if format == "e2m1" else "b16"))
    return lanewise(kernel, ("h2", d.write(i.operands[0], "b32")), source)


def _to_halves(i: Instruction, d: Decoder, m: Modifiers, format: str) -> Step:
    relu, satfinite = m.take("relu"), m.take("satfinite")
    out = ("h2", d.write(i.operands[0], "b32"))
    high, low = (("f32", d.read(x, "f32")) for x in i.operands[1:3])
    if m.take("rs"):
        if format != "bf16":
            raise d.unsupported("stochastic rounding to f16x2")
        operands(i, d, 4)
        m.end()

        def random(a: Array, b: Array, bits: Array, out_: Array) -> None:
            out_[:, 0] = stochastic_bf16(b, bits & np.uint32(0xFFFF), satfinite, relu)
            out_[:, 1] = stochastic_bf16(a, bits >> np.uint32(16), satfinite, relu)

        return lanewise(random, out, high, low, ("u32", d.read(i.operands[3], "b32")))
    rounding = m.choose(("rn", "rz"))
    m.end()
    operands(i, d, 3)
    if rounding == "rn" and not relu and not satfinite:
        return lanewise(nearest_bf16x2() if format == "bf16" else nearest_f16x2, out, high, low)

    def kernel(a: Array, b: Array, out_: Array) -> None:
        low_bits = encode(b, format, rounding, satfinite=satfinite, relu=relu)
        out_[:, 1] = encode(a, format, rounding, satfinite=satfinite, relu=relu)
        out_[:, 0] = low_bits

    return lanewise(kernel, out, high, low)


def stochastic_bf16(x: Array, random: Array, satfinite: bool, relu: bool) -> Array:
    """The random bits are added to the 16 bits that are dropped; a carry rounds away from zero."""
    plain = np.isfinite(x)
    carried = ((x.view(np.uint32) + random) >> np.uint32(16)).astype(np.uint16)
    return encode(np.where(plain, decode(carried, "bf16"), x), "bf16", satfinite=satfinite, relu=relu)


@cache
def nearest_bf16x2() -> Kernel:
    """cvt.rn.bf16x2.f32 of 32 lanes: half of the last place is added to both inputs at once.

    That is right unless an input lies halfway or is NaN, and then the general encoding is called.
    """
    values = np.empty((2, 32), np.float32)
    bits = values.view(np.uint32)
    rounded = np.empty((2, 32), np.uint32)
    halves = rounded.view(np.uint16).reshape(2, 32, 2)
    dropped, kept = halves[:, :, 0], halves[:, :, 1].T
    half = np.array(0x8000, np.uint32)
    flags = np.empty((2, 32), np.bool_)

    def kernel(a: Array, b: Array, out: Array) -> None:
        values[0] = b
        values[1] = a
        np.add(bits, half, rounded)
        np.isnan(values, flags)
        if np.count_nonzero(dropped) != 64 or 1 in flags.tobytes():
            out[...] = encode(values, "bf16").T
        else:
            out[...] = kept

    return kernel


def nearest_f16x2(a: Array, b: Array, out: Array) -> None:
    wide = out.view(np.float16)
    low = b.astype(np.float16)
    wide[:, 1] = a
    wide[:, 0] = low
    flags = np.isnan(wide)
    if 1 in flags.tobytes():
        out[flags] = 0x7FFF


def pack_integers(i: Instruction, d: Decoder) -> Step:
    """cvt.pack.sat: two s32 saturated to a narrow type, a above b; with c, its low bits follow above them."""
    m = Modifiers(i, d)
    m.choose(("pack",))
    m.choose(("sat",))
    small = m.choose(("u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"))
    m.choose(("s32",))
    accumulate = m.take("b32")
    m.end()
    bits = int(small[1:])
    if accumulate != (bits < 16):
        raise d.unsupported("this combination of types")
    operands(i, d, 4 if accumulate else 3)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if small[0] == "s" else (0, (1 << bits) - 1)
    mask = np.uint32((1 << bits) - 1)

    def pair(a: Array, b: Array) -> Array:
        x, y = (np.clip(v, low, high).view(np.uint32) & mask for v in (a, b))
        return np.asarray((x << np.uint32(bits)) | y)

    def two(a: Array, b: Array, out: Array) -> None:
        out[...] = pair(a, b)

    def three(a: Array, b: Array, c: Array, out: Array) -> None:
        out[...] = (c << np.uint32(2 * bits)) | pair(a, b)

    result = ("u32", d.write(i.operands[0], "b32"))
    sources = [("s32", d.read(x, "s32")) for x in i.operands[1:3]]
    if accumulate:
        return lanewise(three, result, *sources, ("u32", d.read(i.operands[3], "b32")))
    return lanewise(two, result, *sources)
