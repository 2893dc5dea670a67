"""Launch capture: a kernel's own host code is called, and what it launches is recorded instead.

The code runs in this process against a stand-in for CuTeDSL's runtime library, with tensors in host memory that say
they lie on a GPU. No kernel is run: simulating the recorded launches comes after.
"""

from __future__ import annotations

import ctypes
import math
import struct
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tunekit.arch import Arch
from tunekit.backends.load import damaged
from tunekit.errors import TunekitError, UserError
from tunekit.simulate.launch.device import FUNCTION_SHARED_SIZE_BYTES, device_attributes
from tunekit.simulate.launch.dlpack import DeviceTensor
from tunekit.simulate.launch.launch import Attribute, Dim3, Launch
from tunekit.simulate.launch.stand_in import (
    DEVICE_ATTRIBUTE,
    KERNEL_ATTRIBUTE,
    LAUNCH,
    REFUSE,
    Answers,
    SetAnswers,
    answers_of,
    link_with_stand_in,
    stand_in,
)
from tunekit.simulate.ptx.module import Kernel, Module

SUCCESS, INVALID_VALUE, NOT_SUPPORTED = 0, 1, 801
# cudaLaunchConfig_t up to the attributes: grid, block, dynamic shared memory, stream, attributes, their number.
CONFIG = struct.Struct("<3I3IQQQI")
# cudaLaunchAttribute: the id, padding, a union of 64 bytes.
ATTRIBUTE_BYTES, VALUE_AT = 72, 8
# cudaLaunchAttributeID (CUDA 13.0, driver_types.h): those whose value is an int, and those that are three.
INT_ATTRIBUTES = {
    2: "cooperative",
    3: "synchronization policy",
    5: "cluster scheduling policy preference",
    6: "programmatic stream serialization",
    8: "priority",
    10: "memory synchronization domain",
    14: "preferred shared memory carveout",
    16: "nvlink-centric scheduling",
}
CLUSTER = "cluster dimension"
DIM_ATTRIBUTES = {4: CLUSTER, 11: "preferred cluster dimension"}
IGNORED_ATTRIBUTE = 0


@runtime_checkable
class OnDevice(Protocol):
    """A tensor in simulated device memory; strides in elements, empty for row-major."""

    @property
    def address(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...


class LaunchError(TunekitError):
    """The host code refused its arguments or the launch. ``str()`` is what it said."""


def capture(library: Path, symbol: str, arguments: Sequence[Any], arch: Arch, module: Module) -> tuple[Launch, ...]:
    """Call `symbol` of an artifact and return the kernels that it launches, in order.

    `arguments` are in the signature's order: tensors as `OnDevice` (a Buffer or DeviceTensor), also within tuples;
    numbers as they are; a stream or another pointer as ``ctypes.c_void_p``. `module` is the PTX with the kernels:
    it declares how many bytes each kernel parameter has.

    Raises:
        LaunchError: the host code raised, or asked for what a device of `arch` does not do.
        TunekitError: the real runtime library is loaded in this process; or the artifact can't be loaded, or calls
            what the stand-in lacks, which is named.
    """
    set_answers = stand_in()
    damage = damaged(library)
    if damage:
        raise TunekitError(f"{library} can't be loaded: {damage}")
    return _record(library, set_answers, symbol, arguments, arch, module)


def capture_object(
    obj: Path | bytes, symbol: str, arguments: Sequence[Any], arch: Arch, module: Module
) -> tuple[Launch, ...]:
    """The same for an exported object (``export_to_c`` of a function compiled with TVM-FFI).

    It is linked with a stand-in of its own, so that the process may have the real runtime library loaded.
    """
    with tempfile.TemporaryDirectory(prefix="tunekit-link-") as scratch:
        path, so = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        if isinstance(obj, bytes):
            path.write_bytes(obj)
        link_with_stand_in(path if isinstance(obj, bytes) else obj, so)
        return _record(so, answers_of(ctypes.CDLL(str(so))), symbol, arguments, arch, module)


def _record(
    library: Path, set_answers: SetAnswers, symbol: str, arguments: Sequence[Any], arch: Arch, module: Module
) -> tuple[Launch, ...]:
    recorder = _Recorder(arch, module)
    function = _function(library, symbol)
    kept: list[DeviceTensor] = []
    call = [_passable(argument, kept) for argument in arguments]
    answers = recorder.answers()
    set_answers(answers)
    try:
        function(*call)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError, AssertionError, BufferError) as error:
        recorder.raise_first()
        raise LaunchError(f"{symbol}: {error}") from error
    finally:
        set_answers(Answers())
    recorder.raise_first()
    return tuple(recorder.launches)


def _function(library: Path, symbol: str) -> Callable[..., Any]:
    import tvm_ffi

    try:
        ctypes.CDLL(str(library))  # binds every symbol now: a missing one is named here, not met as a crash later
    except OSError as error:
        raise TunekitError(f"{library} needs what the launch stand-in does not have: {error}") from error
    module = tvm_ffi.load_module(library)
    try:
        function: Callable[..., Any] = module[symbol]
    except (AttributeError, KeyError, RuntimeError) as error:
        raise TunekitError(f"{library} exports no function '{symbol}'") from error
    return function


def _passable(argument: Any, kept: list[DeviceTensor]) -> Any:
    if isinstance(argument, (tuple, list)):
        return tuple(_passable(item, kept) for item in argument)
    if isinstance(argument, OnDevice):
        import tvm_ffi

        tensor = DeviceTensor(argument.address, argument.dtype, tuple(argument.shape), tuple(argument.strides))
        kept.append(tensor)
        return tvm_ffi.from_dlpack(tensor)
    if hasattr(argument, "__dlpack__"):
        raise UserError(f"a {type(argument).__name__} is no tensor of the simulated device: put it into Buffers")
    return argument


class _Recorder:
    """Answers the stand-in's calls. An exception can't cross the C code, so the first is kept and raised after."""

    def __init__(self, arch: Arch, module: Module) -> None:
        self.launches: list[Launch] = []
        self._arch = arch
        self._module = module
        self._device = device_attributes(arch)
        self._first: TunekitError | None = None

    def answers(self) -> Answers:
        return Answers(
            LAUNCH(self._launch),
            DEVICE_ATTRIBUTE(self._device_attribute),
            KERNEL_ATTRIBUTE(self._kernel_attribute),
            REFUSE(self._refuse),
        )

    def raise_first(self) -> None:
        if self._first is not None:
            raise self._first

    def _fail(self, words: str, error: int = NOT_SUPPORTED) -> int:
        if self._first is None:
            self._first = LaunchError(words)
        return error

    def _refuse(self, function: bytes) -> int:
        return self._fail(f"the host code calls {function.decode().lstrip('_')}, which launch capture does not model")

    def _device_attribute(self, attribute: int, value: Any) -> int:
        if attribute not in self._device:
            return self._fail(f"the host code asks for device attribute {attribute}, unknown to launch capture")
        value[0] = self._device[attribute]
        return SUCCESS

    def _kernel_attribute(self, name: bytes, attribute: int, value: Any) -> int:
        kernel = self._kernel(name)
        if kernel is None:
            return NOT_SUPPORTED
        if attribute != FUNCTION_SHARED_SIZE_BYTES:
            return self._fail(f"the host code asks for kernel attribute {attribute}, unknown to launch capture")
        value[0] = self._static_shared_bytes(kernel)
        return SUCCESS

    def _kernel(self, name: bytes) -> Kernel | None:
        kernels = self._module.kernels
        if name.decode() not in kernels:
            self._fail(f"kernel {name.decode()} is not in the PTX (kernels: {', '.join(kernels)})")
        return kernels.get(name.decode())

    def _static_shared_bytes(self, kernel: Kernel) -> int:
        variables = (*self._module.variables, *kernel.variables)
        return sum(variable.size for variable in variables if variable.space == "shared")

    def _launch(self, name: bytes, config: int, parameters: Any) -> int:
        kernel = self._kernel(name)
        if kernel is None:
            return NOT_SUPPORTED
        fields = CONFIG.unpack(ctypes.string_at(config, CONFIG.size))
        attributes = _attributes(address=fields[8], count=fields[9])
        launch = Launch(
            kernel=kernel.name,
            grid=fields[0:3],
            block=fields[3:6],
            cluster=_cluster(attributes, kernel),
            shared_bytes=fields[6],
            attributes=attributes,
            parameters=tuple(
                ctypes.string_at(parameters[index], parameter.size) for index, parameter in enumerate(kernel.parameters)
            ),
        )
        refusal = launch.refusal(self._arch, self._static_shared_bytes(kernel)) or against_directives(launch, kernel)
        if refusal:
            return self._fail(f"{kernel.name} can't be launched: {refusal}", INVALID_VALUE)
        self.launches.append(launch)
        return SUCCESS


def _attributes(address: int, count: int) -> dict[str, Attribute]:
    found: dict[str, Attribute] = {}
    for index in range(count):
        raw = ctypes.string_at(address + index * ATTRIBUTE_BYTES, ATTRIBUTE_BYTES)
        identity, value = int.from_bytes(raw[:4], "little"), raw[VALUE_AT:]
        if identity in INT_ATTRIBUTES:
            found[INT_ATTRIBUTES[identity]] = int.from_bytes(value[:4], "little", signed=True)
        elif identity in DIM_ATTRIBUTES:
            found[DIM_ATTRIBUTES[identity]] = struct.unpack("<3I", value[:12])
        elif identity != IGNORED_ATTRIBUTE:
            found[f"attribute {identity}"] = value
    return found


def _cluster(attributes: Mapping[str, Attribute], kernel: Kernel) -> Dim3:
    """The cluster that the launch asks for, else the one that the kernel requires (PTX ISA, "Cluster Dimension
    Directives")."""
    asked = attributes.get(CLUSTER)
    if isinstance(asked, tuple):
        return asked
    return _sides(kernel, "reqnctapercluster") or (1, 1, 1)


def _sides(kernel: Kernel, directive: str) -> Dim3 | None:
    """The sides that a directive of the kernel names, 1 where it leaves them out; None without it."""
    if directive not in kernel.directives:
        return None
    x, y, z = (*(int(side) for side in kernel.directives[directive].split(",")), 1, 1)[:3]
    return x, y, z


def against_directives(launch: Launch, kernel: Kernel) -> str | None:
    """Why the kernel's own directives forbid the launch (PTX ISA 11.2 and 11.4), in a sentence, or None."""
    for directive, asked in (("reqntid", launch.block), ("reqnctapercluster", launch.cluster)):
        required = _sides(kernel, directive)
        if required is not None and required != asked:
            return f"{asked} where its .{directive} demands {required}"
    most = _sides(kernel, "maxntid")
    if most is not None and math.prod(launch.block) > math.prod(most):
        return f"{math.prod(launch.block)} threads a CTA > {math.prod(most)} (.maxntid)"
    return None
