"""The kernels' arguments, from the spec's own signature: their names in call order, and fakes to trace with."""

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from tunekit.model import Values
from tunekit.spec import TensorArg

from ...attention.signature import AXES, SIGNATURE

ELEMENT_TYPES = {"bfloat16": BFloat16, "float16": Float16, "float32": Float32, "int32": Int32}
VECTOR_ELEMENTS = 8  # of 16 bits: the 16 bytes that TMA asks of strides
STATIC = frozenset(axis.name for axis in AXES if axis.static)


def element_type(problem: Values):
    """The type of Q, K, V and O."""
    return ELEMENT_TYPES[str(problem.dtype)]


def argument_names(problem: Values) -> tuple[str, ...]:
    """The arguments that a problem's kernel takes, in order; then comes the workspace, if any, and the stream."""
    return tuple(arg.name for arg in SIGNATURE if arg.when is None or arg.when(problem))


def by_name(problem: Values, arguments: tuple) -> dict:
    """The arguments of a call, the stream too, by name."""
    names = (*argument_names(problem), "stream")
    if len(arguments) == len(names) + 1:
        names = (*names[:-1], "workspace", "stream")
    return dict(zip(names, arguments, strict=True))


def make_fake_args(problem: Values, workspace: bool = False) -> tuple:
    """What ``cute.compile`` needs to trace a kernel of this problem: no device, no data.

    Run-time axes are symbols shared by all tensors. Q, K, V and O: the innermost two modes are compact, the strides of
    the others multiples of 16 bytes; everything else is compact but for its outer strides.
    """
    symbols: dict[str, object] = {}

    def size(dim: str | int):
        if isinstance(dim, int):
            return dim
        if dim in STATIC:
            return int(problem[dim])
        if dim not in symbols:
            symbols[dim] = cute.sym_int32()
        return symbols[dim]

    def tensor(arg: TensorArg):
        shape = tuple(size(dim) for dim in arg.dims(problem))
        element = ELEMENT_TYPES[arg.dtype_of(problem)]
        wide = element.width == 16
        compact = 2 if wide else 1
        outer = tuple(cute.sym_int64(divisibility=VECTOR_ELEMENTS if wide else 1) for _ in shape[compact:])
        inner = (shape[-1], 1) if wide else (1,)
        return make_fake_tensor(element, shape, (*outer, *inner), assumed_align=16 if wide else element.width // 8)

    fakes = []
    for arg in SIGNATURE:
        if arg.when is not None and not arg.when(problem):
            continue
        fakes.append(tensor(arg) if isinstance(arg, TensorArg) else ELEMENT_TYPES[arg.dtype](1))
    if workspace:
        fakes.append(make_fake_tensor(Float32, (cute.sym_int32(),), (1,), assumed_align=16))
    return (*fakes, make_fake_stream(use_tvm_ffi_env_stream=True))
