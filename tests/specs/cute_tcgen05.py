"""One matrix product on tcgen05, D = A B^T, with the operand types, majors, swizzles and CTA groups of CuTeDSL.

Operands are passed as words, [rows, 32], that hold numbers of the type `operand`.
"""

from __future__ import annotations

from tunekit.spec import Axis, Implementation, KernelSpec, TensorArg, Tolerance, Tunable

ROW_WORDS = 32
OPERANDS = {1: "bfloat16", 2: "float16", 3: "float8_e4m3fn", 4: "float8_e5m2", 5: "int8", 6: "float32"}


def elements(data, operand):
    """The numbers in the words, as float64; tensor cores look at the upper 19 bits of a float32."""
    import torch

    if operand == 6:
        data = data & ~0x1FFF
    return data.cpu().view(getattr(torch, OPERANDS[operand])).to(torch.float64)


def draw(problem, generator, device):
    import torch

    dtype = getattr(torch, OPERANDS[problem.operand])
    found = {}
    for tensor, rows in (("a", problem.m), ("b", problem.n)):
        shape = (rows, 4 * ROW_WORDS // dtype.itemsize)
        numbers = torch.randn(shape, generator=generator, device=device) * (20 if problem.operand == 5 else 1)
        found[tensor] = numbers.to(dtype).contiguous().view(torch.int32)
    return found


def reference(problem, given):
    return {"d": elements(given["a"], problem.operand) @ elements(given["b"], problem.operand).T}


def build(b):
    from .cute_tcgen05_kernel import Product, fake_args

    p = b.problem
    return Product(operand=OPERANDS[p.operand], m=p.m, n=p.n, **b.tunables), fake_args(p.m, p.n)


cute_tcgen05 = KernelSpec(
    name="cute_tcgen05",
    version=1,
    axes=(
        Axis("operand", values=tuple(OPERANDS), static=True, default=1),
        Axis("m", values=(64, 128, 256), static=True, default=128),
        Axis("n", values=(32, 64, 256), static=True, default=64),
    ),
    signature=(
        TensorArg("a", ("m", ROW_WORDS), "int32"),
        TensorArg("b", ("n", ROW_WORDS), "int32"),
        TensorArg("d", ("m", "n"), "float32", role="output"),
    ),
    implementations=(
        Implementation(
            name="one_tile",
            requires={"tcgen05"},
            tunables=(
                Tunable("a_major", ("K", "MN")),
                Tunable("b_major", ("K", "MN")),
                Tunable("swizzle", ("SW128", "SW64", "SW32", "INTER", "SW128_32B")),
                Tunable("ctas", (1, 2)),
            ),
            defaults=({"a_major": "K", "b_major": "K", "swizzle": "SW128", "ctas": 1},),
            build=build,
        ),
    ),
    inputs=draw,
    reference=reference,
    tolerance=Tolerance(cosine=0.999999, relative_norm=1e-3),
)
