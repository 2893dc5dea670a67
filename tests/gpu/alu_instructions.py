"""The arithmetic that a Hopper GPU and the simulator both run: (instruction, types of the inputs, type of the output).

Operands are named as alu_lanes.on_lanes wants them. What only later architectures have (f32x2, three-input min and
max, e2m1 ...) is not here. Types that are no PTX types: a u32 of limited range (WORDS).
"""

from __future__ import annotations

from collections.abc import Iterator

# Positions and lengths of bit fields are 0 to 255 (PTX ISA 9.7.1, bfe and bfi); offsets of fns are small.
WORDS = {"byte": (0, 256), "lane": (0, 32), "small": (-33, 34)}
MODES = ("rn", "rz", "rm", "rp")
INTEGERS = ("u16", "s16", "u32", "s32", "u64", "s64")
COMPARISONS = "eq ne lt le gt ge equ neu ltu leu gtu geu num nan"


def floating() -> Iterator[tuple[str, str, str]]:
    for mode in MODES:
        for name in ("add", "sub", "mul", "div"):
            yield f"{name}.{mode}.f64 {{x}}, {{a}}, {{b}};", "f64 f64", "f64"
            yield f"{name}.{mode}.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
            if name != "div":
                yield f"{name}.{mode}.ftz.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
                yield f"{name}.{mode}.sat.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
        for kind in ("f32", "f64"):
            yield f"fma.{mode}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind
            yield f"sqrt.{mode}.{kind} {{x}}, {{a}};", kind, kind
            yield f"rcp.{mode}.{kind} {{x}}, {{a}};", kind, kind
        yield f"fma.{mode}.ftz.f32 {{x}}, {{a}}, {{b}}, {{c}};", "f32 f32 f32", "f32"
    for name in ("min", "max"):
        for flags in ("", ".ftz", ".NaN", ".xorsign.abs"):
            yield f"{name}{flags}.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
        for kind in ("f16", "bf16"):
            for flags in ("", ".NaN", ".xorsign.abs"):
                yield f"{name}{flags}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
    for kind in ("f16", "bf16"):
        for name in ("add", "sub", "mul"):
            yield f"{name}.rn.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
        for flags in ("", ".relu", *((".ftz", ".sat") if kind == "f16" else ())):
            yield f"fma.rn{flags}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind
    for name in COMPARISONS.split():
        for kind in ("f32", "f64", "f16", "bf16"):
            yield f"setp.{name}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", "pred"


def conversions() -> Iterator[tuple[str, str, str]]:
    for kind in ("f16", "f32", "f64", "bf16"):
        for to in ("u16", "s16", "u32", "s32", "u64", "s64"):
            for mode in ("rni", "rzi", "rmi", "rpi"):
                yield f"cvt.{mode}.{to}.{kind} {{x}}, {{a}};", kind, to
            for mode in MODES:
                yield f"cvt.{mode}.{kind}.{to} {{x}}, {{a}};", to, kind
    for mode in MODES:
        for to, kind in (("f16", "f32"), ("bf16", "f32"), ("f32", "f64"), ("f16", "f64"), ("bf16", "f64")):
            yield f"cvt.{mode}.{to}.{kind} {{x}}, {{a}};", kind, to
    for kind in ("f16", "bf16"):
        yield f"cvt.f32.{kind} {{x}}, {{a}};", kind, "f32"
        for mode in ("rn", "rz"):
            for flags in ("", ".relu", ".satfinite", ".relu.satfinite"):
                yield f"cvt.{mode}{flags}.{kind}x2.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "u32"
    for mode in ("rna", "rn", "rz"):
        yield f"cvt.{mode}.tf32.f32 {{x}}, {{a}};", "f32", "u32"
    for kind in ("e4m3x2", "e5m2x2"):
        for flags in ("", ".relu"):
            yield f"cvt.rn.satfinite{flags}.{kind}.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "u16"
            yield f"cvt.rn.satfinite{flags}.{kind}.f16x2 {{x}}, {{a}};", "u32", "u16"
            yield f"cvt.rn{flags}.f16x2.{kind} {{x}}, {{a}};", "u16", "u32"
    for kind in ("u16", "s16"):
        yield f"cvt.pack.sat.{kind}.s32 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
    for kind in ("u8", "s8"):
        yield f"cvt.pack.sat.{kind}.s32.b32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"


def integers() -> Iterator[tuple[str, str, str]]:
    for kind in INTEGERS:
        two, three = f"{kind} {kind}", f"{kind} {kind} {kind}"
        for name in ("add", "sub", "mul.lo", "mul.hi", "min", "max"):
            yield f"{name}.{kind} {{x}}, {{a}}, {{b}};", two, kind
        for name in ("mad.lo", "mad.hi", "sad"):
            yield f"{name}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", three, kind
        yield f"shr.{kind} {{x}}, {{a}}, {{b}};", f"{kind} u32", kind
        if kind[1:] != "16":
            yield f"bfind.{kind} {{x}}, {{a}};", kind, "u32"
            yield f"bfind.shiftamt.{kind} {{x}}, {{a}};", kind, "u32"
            yield f"bfe.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} byte byte", kind
    for kind in ("u32", "s32"):
        for half in ("lo", "hi"):
            yield f"mul24.{half}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
        for mode in ("clamp", "wrap"):
            yield f"szext.{mode}.{kind} {{x}}, {{a}}, {{b}};", f"{kind} u32", kind
        yield f"dp4a.{kind}.s32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
        yield f"dp2a.hi.{kind}.u32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for bits in (32, 64):
        kind = f"u{bits}"
        for name in ("popc", "clz"):
            yield f"{name}.b{bits} {{x}}, {{a}};", kind, "u32"
        yield f"brev.b{bits} {{x}}, {{a}};", kind, kind
        yield f"shl.b{bits} {{x}}, {{a}}, {{b}};", f"{kind} u32", kind
        yield f"bfi.b{bits} {{x}}, {{a}}, {{b}}, {{c}}, {{e}};", f"{kind} {kind} byte byte", kind
    for mode in ("clamp", "wrap"):
        yield f"bmsk.{mode}.b32 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        for side in ("l", "r"):
            yield f"shf.{side}.{mode}.b32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for mode in ("", ".f4e", ".b4e", ".rc8", ".ecl", ".ecr", ".rc16"):
        yield f"prmt.b32{mode} {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    yield "lop3.b32 {x}, {a}, {b}, {c}, 0xE2;", "u32 u32 u32", "u32"
    yield "min.relu.s32 {x}, {a}, {b};", "u32 u32", "u32"


def others() -> Iterator[tuple[str, str, str]]:
    """Signs, copies, tests, packed halves, carries, wide products, and conversions that name two flags."""
    for kind in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        size = kind if kind[-2:] != "x2" else "u32"
        for name in ("abs", "neg"):
            for ftz in ("", ".ftz") if kind in ("f32", "f16", "f16x2") else ("",):
                yield f"{name}{ftz}.{kind} {{x}}, {{a}};", size, size
        if kind in ("f32", "f64"):
            yield f"copysign.{kind} {{x}}, {{a}}, {{b}};", f"{kind} {kind}", kind
            for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
                yield f"testp.{test}.{kind} {{x}}, {{a}};", kind, "pred"
    for kind in ("f16x2", "bf16x2"):
        for name in ("add", "sub", "mul"):
            yield f"{name}.rn.{kind} {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        for name in ("min", "max", "min.NaN", "max.NaN", "min.xorsign.abs"):
            yield f"{name}.{kind} {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        for flags in ("", ".relu", *((".ftz", ".sat", ".ftz.sat", ".ftz.relu") if kind == "f16x2" else ())):
            yield f"fma.rn{flags}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for name in ("add", "sub", "mul"):
        for flags in (".ftz", ".sat", ".ftz.sat"):
            yield f"{name}.rn{flags}.f16 {{x}}, {{a}}, {{b}};", "f16 f16", "f16"
        yield f"{name}.rn.ftz.sat.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
    for name in ("min", "max"):
        yield f"{name}.f64 {{x}}, {{a}}, {{b}};", "f64 f64", "f64"
        yield f"{name}.ftz.NaN.xorsign.abs.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
        yield f"{name}.ftz.f16 {{x}}, {{a}}, {{b}};", "f16 f16", "f16"
        for kind in ("u16x2", "s16x2"):
            yield f"{name}.{kind} {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        yield f"{name}.relu.s16x2 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
    for kind in ("u16x2", "s16x2"):
        yield f"add.{kind} {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
    for mode in MODES:
        yield f"fma.{mode}.ftz.sat.f32 {{x}}, {{a}}, {{b}}, {{c}};", "f32 f32 f32", "f32"
        for name in ("rcp", "sqrt"):
            yield f"{name}.{mode}.ftz.f32 {{x}}, {{a}};", "f32", "f32"
        yield f"div.{mode}.ftz.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "f32"
        yield f"cvt.{mode}.ftz.f32.f64 {{x}}, {{a}};", "f64", "f32"
        yield f"cvt.{mode}.sat.f32.f64 {{x}}, {{a}};", "f64", "f32"
        yield f"cvt.{mode}.ftz.f16.f32 {{x}}, {{a}};", "f32", "f16"
        yield f"cvt.{mode}.sat.f16.f32 {{x}}, {{a}};", "f32", "f16"
        yield f"cvt.{mode}.sat.f16.f64 {{x}}, {{a}};", "f64", "f16"
        yield f"cvt.{mode}.bf16.f16 {{x}}, {{a}};", "f16", "bf16"
        yield f"cvt.{mode}.f16.bf16 {{x}}, {{a}};", "bf16", "f16"
    for kind in ("f16", "f32", "f64"):
        for mode in ("rni", "rzi", "rmi", "rpi"):
            yield f"cvt.{mode}.{kind}.{kind} {{x}}, {{a}};", kind, kind
            yield f"cvt.{mode}.sat.{kind}.{kind} {{x}}, {{a}};", kind, kind
            if kind == "f32":
                yield f"cvt.{mode}.ftz.f32.f32 {{x}}, {{a}};", kind, kind
                yield f"cvt.{mode}.ftz.s32.f32 {{x}}, {{a}};", kind, "u32"
    for text, types, output in (
        ("cvt.f64.f32", "f32", "f64"),
        ("cvt.ftz.f64.f32", "f32", "f64"),
        ("cvt.sat.f64.f32", "f32", "f64"),
        ("cvt.f64.f16", "f16", "f64"),
        ("cvt.f64.bf16", "bf16", "f64"),
        ("cvt.ftz.f32.f16", "f16", "f32"),
        ("cvt.sat.f32.f16", "f16", "f32"),
        ("cvt.ftz.f32.bf16", "bf16", "f32"),
        ("cvt.sat.f32.f32", "f32", "f32"),
        ("cvt.ftz.f32.f32", "f32", "f32"),
        ("cvt.rna.satfinite.tf32.f32", "f32", "u32"),
        ("cvt.rn.relu.tf32.f32", "f32", "u32"),
        ("cvt.rz.relu.tf32.f32", "f32", "u32"),
        ("cnot.b32", "u32", "u32"),
        ("cnot.b64", "u64", "u64"),
        ("not.b64", "u64", "u64"),
    ):
        yield f"{text} {{x}}, {{a}};", types, output
    for mode in ("rn", "rz"):
        for flags in ("", ".relu", ".satfinite", ".relu.satfinite"):
            for kind in ("f16", "bf16"):
                yield f"cvt.{mode}{flags}.{kind}.f32 {{x}}, {{a}};", "f32", kind
    yield from other_integers()


def other_integers() -> Iterator[tuple[str, str, str]]:
    for kind in INTEGERS:
        two = f"{kind} {kind}"
        yield f"setp.lt.{kind} {{x}}, {{a}}, {{b}};", two, "pred"
        yield f"setp.ge.{kind} {{x}}, {{a}}, {{b}};", two, "pred"
        yield f"set.le.u32.{kind} {{x}}, {{a}}, {{b}};", two, "u32"
        yield f"set.gt.f32.{kind} {{x}}, {{a}}, {{b}};", two, "u32"
        yield f"slct.{kind}.s32 {{x}}, {{a}}, {{b}}, {{c}};", f"{two} u32", kind
        if kind[0] == "s":
            yield f"abs.{kind} {{x}}, {{a}};", kind, kind
            yield f"neg.{kind} {{x}}, {{a}};", kind, kind
        if kind[1:] != "64":
            wide = f"u{2 * int(kind[1:])}"
            yield f"mul.wide.{kind} {{x}}, {{a}}, {{b}};", two, wide
            yield f"mad.wide.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{two} {wide}", wide
        for to in INTEGERS:
            if to != kind:
                yield f"cvt.{to}.{kind} {{x}}, {{a}};", kind, to
                if int(to[1:]) <= int(kind[1:]) or (kind[0], to[0]) == ("s", "u"):
                    yield f"cvt.sat.{to}.{kind} {{x}}, {{a}};", kind, to
    for kind in ("u32", "s32"):
        yield (
            f"mad.hi{'.sat' if kind == 's32' else ''}.{kind} {{x}}, {{a}}, {{b}}, {{c}};",
            f"{kind} {kind} {kind}",
            kind,
        )
        yield f"mad24.lo.{kind} {{x}}, {{a}}, {{b}}, {{c}};", f"{kind} {kind} {kind}", kind
        yield f"dp4a.{kind}.u32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
        yield f"dp2a.lo.{kind}.s32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for name in ("add", "sub"):
        yield f"{name}.sat.s32 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        for bits in (32, 64):
            kind = f"u{bits}"
            text = f"{name}.cc.{kind} {{x}}, {{a}}, {{b}}; {name}c.{kind} {{x}}, {{a}}, {{c}};"
            yield text, f"{kind} {kind} {kind}", kind
    yield "mad.lo.cc.u32 {x}, {a}, {b}, {c}; madc.hi.u32 {x}, {a}, {b}, {c};", "u32 u32 u32", "u32"
    for name in ("and", "or", "xor"):
        for bits in (16, 32, 64):
            yield f"{name}.b{bits} {{x}}, {{a}}, {{b}};", f"u{bits} u{bits}", f"u{bits}"
    for name in ("max.relu", "min.relu"):
        yield f"{name}.s32 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
    yield "fns.b32 {x}, {a}, {b}, {c};", "u32 lane small", "u32"
    for kind in ("s4", "u4", "s2", "u2"):
        yield f"cvt.pack.sat.{kind}.s32.b32 {{x}}, {{a}}, {{b}}, {{c}};", "u32 u32 u32", "u32"
    for mode in ("gt", "leu", "num"):
        yield f"set.{mode}.u32.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "u32"
        yield f"set.{mode}.ftz.f32.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "u32"
        yield f"set.{mode}.f16x2.f16x2 {{x}}, {{a}}, {{b}};", "u32 u32", "u32"
        yield f"set.{mode}.f16.f16 {{x}}, {{a}}, {{b}};", "f16 f16", "u16"
        yield f"setp.{mode}.ftz.f32 {{x}}, {{a}}, {{b}};", "f32 f32", "pred"


def with_nan() -> Iterator[tuple[str, list[str], str]]:
    """(instruction, formats of the inputs, type of the output)."""
    for kind in ("f32", "f64", "f16", "bf16"):
        for text in ("abs", "neg", *(("cvt.rni", "cvt.rzi") if kind != "bf16" else ())):
            yield f"{text}.{f'{kind}.{kind}' if text[0] == 'c' else kind} {{x}}, {{a}};", [kind], kind
        for text in (
            "add.rn",
            "sub.rn",
            "mul.rn",
            "min",
            "max",
            *(("copysign", "div.rn") if kind[-2:] != "16" else ()),
        ):
            yield f"{text}.{kind} {{x}}, {{a}}, {{b}};", [kind, kind], kind
        if kind != "f64":
            for text in ("min.NaN", "max.NaN", "min.xorsign.abs", "max.NaN.xorsign.abs"):
                yield f"{text}.{kind} {{x}}, {{a}}, {{b}};", [kind, kind], kind
        for text in ("fma.rn", *(("fma.rn.relu",) if kind[-2:] == "16" else ())):
            yield f"{text}.{kind} {{x}}, {{a}}, {{b}}, {{c}};", [kind, kind, kind], kind
        if kind[0] == "f" and kind != "f16":
            for text in ("rcp.rn", "sqrt.rn"):
                yield f"{text}.{kind} {{x}}, {{a}};", [kind], kind
    yield "add.rz.f64 {x}, {a}, {b};", ["f64", "f64"], "f64"
    yield "fma.rz.f64 {x}, {a}, {b}, {c};", ["f64", "f64", "f64"], "f64"
    for text in ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64", "rsqrt.approx.f64"):
        yield f"{text} {{x}}, {{a}};", ["f64"], "f64"
    for text in ("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh"):
        yield f"{text}.approx.f32 {{x}}, {{a}};", ["f32"], "f32"
        if text != "tanh":
            yield f"{text}.approx.ftz.f32 {{x}}, {{a}};", ["f32"], "f32"
    for text, kind in (
        ("ex2.approx", "f16"),
        ("ex2.approx.ftz", "bf16"),
        ("tanh.approx", "f16"),
        ("tanh.approx", "bf16"),
    ):
        yield f"{text}.{kind} {{x}}, {{a}};", [kind], kind
    for text in ("abs.ftz.f32", "neg.ftz.f32", "cvt.ftz.f32.f32", "cvt.sat.f32.f32", "cvt.rni.ftz.f32.f32"):
        yield f"{text} {{x}}, {{a}};", ["f32"], "f32"
    for text in ("abs.ftz.f16", "neg.ftz.f16"):
        yield f"{text} {{x}}, {{a}};", ["f16"], "f16"
    for text in ("add.ftz.f32", "mul.sat.f32", "min.ftz.f32", "div.approx.f32", "div.full.f32"):
        yield f"{text} {{x}}, {{a}}, {{b}};", ["f32", "f32"], "f32"
    yield "fma.rn.sat.f32 {x}, {a}, {b}, {c};", ["f32", "f32", "f32"], "f32"
    yield "fma.rn.ftz.f16 {x}, {a}, {b}, {c};", ["f16", "f16", "f16"], "f16"
    yield "fma.rn.sat.f16 {x}, {a}, {b}, {c};", ["f16", "f16", "f16"], "f16"
    yield from conversions_of_nan()


def conversions_of_nan() -> Iterator[tuple[str, list[str], str]]:
    for mode in MODES:
        for kinds in ("f32.f64", "f16.f64", "bf16.f64", "f16.f32", "bf16.f32", "bf16.f16", "f16.bf16"):
            to, kind = kinds.split(".")
            yield f"cvt.{mode}.{kinds} {{x}}, {{a}};", [kind], to
            if to != "bf16" and kind != "bf16":
                yield f"cvt.{mode}.sat.{kinds} {{x}}, {{a}};", [kind], to
        yield f"cvt.{mode}.ftz.f32.f64 {{x}}, {{a}};", ["f64"], "f32"
    for kinds in (
        "f64.f32",
        "f64.f16",
        "f64.bf16",
        "f32.f16",
        "f32.bf16",
        "ftz.f32.f16",
        "ftz.f64.f32",
        "ftz.f32.bf16",
    ):
        *_, to, kind = kinds.split(".")
        yield f"cvt.{kinds} {{x}}, {{a}};", [kind], to
    for kinds in ("sat.f64.f32", "sat.f32.f16", "sat.f64.f16"):
        *_, to, kind = kinds.split(".")
        yield f"cvt.{kinds} {{x}}, {{a}};", [kind], to
    for mode in ("rn", "rz"):
        for flags in ("", ".relu", ".satfinite", ".relu.satfinite"):
            if "satfinite" not in flags:
                yield f"cvt.{mode}{flags}.tf32.f32 {{x}}, {{a}};", ["f32"], "u32"
            for to in ("f16", "bf16"):
                yield f"cvt.{mode}{flags}.{to}x2.f32 {{x}}, {{a}}, {{b}};", ["f32", "f32"], "u32"
                yield f"cvt.{mode}{flags}.{to}.f32 {{x}}, {{a}};", ["f32"], to
    for flags in ("", ".satfinite"):
        yield f"cvt.rna{flags}.tf32.f32 {{x}}, {{a}};", ["f32"], "u32"
    for to in ("e4m3x2", "e5m2x2"):
        for flags in ("", ".relu"):
            yield f"cvt.rn.satfinite{flags}.{to}.f32 {{x}}, {{a}}, {{b}};", ["f32", "f32"], "u16"
    for kind in ("f16", "bf16", "f32", "f64"):
        for to in INTEGERS:
            yield f"cvt.rzi.{to}.{kind} {{x}}, {{a}};", [kind], to
