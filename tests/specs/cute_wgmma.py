"""One matrix product on wgmma, D = A B^T, with every operand type, major and swizzle that CuTeDSL writes.

Operands are passed as words, [rows, 32], that hold numbers of the type `operand`. ``cute_wgmma`` draws normally
distributed ones; ``cute_wgmma_whole`` small integers, so that every sum is exact and any hardware agrees to the bit.
"""

from __future__ import annotations

from tunekit.spec import Axis, Constraint, Implementation, KernelSpec, TensorArg, Tolerance, Tunable

ROWS, ROW_WORDS = 64, 32
# The axis `operand`: a type, and the largest whole number drawn, exact in it.
OPERANDS = {1: ("bfloat16", 8), 2: ("float16", 8), 3: ("float8_e4m3fn", 4), 4: ("float8_e5m2", 4), 5: ("int8", 8)}
NARROW = 3  # from here on, 8 bits


def elements(data, operand):
    """The numbers in the words, as float64."""
    import torch

    return data.cpu().view(getattr(torch, OPERANDS[operand][0])).to(torch.float64)


def draw(problem, generator, device, whole):
    import torch

    name, largest = OPERANDS[problem.operand]
    dtype = getattr(torch, name)
    found = {}
    for tensor, rows in (("a", ROWS), ("b", problem.n)):
        shape = (rows, 4 * ROW_WORDS // dtype.itemsize)
        if whole or name == "int8":
            numbers = torch.randint(-largest, largest + 1, shape, generator=generator, device=device).float()
        else:
            numbers = torch.randn(shape, generator=generator, device=device)
        found[tensor] = numbers.to(dtype).contiguous().view(torch.int32)
    return found


def reference(problem, given):
    return {"d": elements(given["a"], problem.operand) @ elements(given["b"], problem.operand).T}


def build(b):
    from .cute_wgmma_kernel import Product, fake_args

    return Product(operand=OPERANDS[b.problem.operand][0], n=b.problem.n, **b.tunables), fake_args(b.problem.n)


def spec(name, whole):
    return KernelSpec(
        name=name,
        version=1,
        axes=(
            Axis("operand", values=tuple(OPERANDS), static=True, default=1),
            Axis("n", values=(8, 64, 256), static=True, default=64),
        ),
        signature=(
            TensorArg("a", (ROWS, ROW_WORDS), "int32"),
            TensorArg("b", ("n", ROW_WORDS), "int32"),
            TensorArg("d", (ROWS, "n"), "float32", role="output"),
        ),
        implementations=(
            Implementation(
                name="one_warpgroup",
                requires={"wgmma"},
                tunables=(
                    Tunable("a_major", ("K", "MN")),
                    Tunable("b_major", ("K", "MN")),
                    Tunable("swizzle", ("SW128", "SW64", "SW32", "INTER")),
                    Tunable("a_source", ("SMEM", "RMEM")),
                ),
                constraints=(
                    Constraint(
                        "majors",
                        "8-bit operands and those in registers are K-major",
                        lambda v: (
                            (v.a_major == "K" or (v.operand < NARROW and v.a_source == "SMEM"))
                            and (v.b_major == "K" or v.operand < NARROW)
                        ),
                    ),
                    Constraint(
                        "atom",
                        "a swizzle atom along N has 128 bytes at most and must fit n",
                        lambda v: v.b_major == "K" or v.n >= 64,
                    ),
                ),
                defaults=({"a_major": "K", "b_major": "K", "swizzle": "SW128", "a_source": "SMEM"},),
                build=build,
            ),
        ),
        inputs=lambda problem, generator, device: draw(problem, generator, device, whole),
        reference=reference,
        tolerance=Tolerance(cosine=0.999999, relative_norm=1e-3),
    )


cute_wgmma = spec("cute_wgmma", whole=False)
cute_wgmma_whole = spec("cute_wgmma_whole", whole=True)
