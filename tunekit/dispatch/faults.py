"""Sticky CUDA errors: those after which the process's CUDA context is lost and every later call fails too.

They are told from harmless ones (a refused launch, no memory) by what CUDA calls them, in whichever words they come:
torch's, CuTeDSL's, its run-time library's in a process without CuTeDSL, or the driver's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from tunekit.errors import DeviceFaultError, TunekitError, words_of


class Fault(NamedTuple):
    """One sticky error: its name and number in CUDA's run-time API, its number's words there, and why it is sticky.

    `driver` is the driver API's name for it; both APIs share the numbers.
    """

    name: str
    code: int
    words: str
    driver: str
    reason: str


_EXCEPTION = "an exception on the device ends its context; CUDA's manual asks for a new process"
_HARDWARE = "the hardware lost data; what is in the context's memory can't be relied on"

STICKY = (
    Fault(
        "cudaErrorECCUncorrectable",
        214,
        "uncorrectable ECC error encountered",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        _HARDWARE,
    ),
    Fault(
        "cudaErrorNvlinkUncorrectable",
        220,
        "uncorrectable NVLink error detected during the execution",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        _HARDWARE,
    ),
    Fault(
        "cudaErrorContained",
        226,
        "Invalid access of peer GPU memory over nvlink or a hardware error",
        "CUDA_ERROR_CONTAINED",
        _HARDWARE,
    ),
    Fault(
        "cudaErrorIllegalAddress",
        700,
        "an illegal memory access was encountered",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        _EXCEPTION,
    ),
    Fault(
        "cudaErrorLaunchTimeout",
        702,
        "the launch timed out and was terminated",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "the driver killed the kernel, and its context with it",
    ),
    Fault(
        "cudaErrorContextIsDestroyed",
        709,
        "context is destroyed",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "the context is gone, and its memory and kernels with it",
    ),
    Fault("cudaErrorAssert", 710, "device-side assert triggered", "CUDA_ERROR_ASSERT", _EXCEPTION),
    Fault("cudaErrorHardwareStackError", 714, "hardware stack error", "CUDA_ERROR_HARDWARE_STACK_ERROR", _EXCEPTION),
    Fault(
        "cudaErrorIllegalInstruction",
        715,
        "an illegal instruction was encountered",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        _EXCEPTION,
    ),
    Fault("cudaErrorMisalignedAddress", 716, "misaligned address", "CUDA_ERROR_MISALIGNED_ADDRESS", _EXCEPTION),
    Fault(
        "cudaErrorInvalidAddressSpace",
        717,
        "operation not supported on global/shared address space",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        _EXCEPTION,
    ),
    Fault("cudaErrorInvalidPc", 718, "invalid program counter", "CUDA_ERROR_INVALID_PC", _EXCEPTION),
    Fault("cudaErrorLaunchFailure", 719, "unspecified launch failure", "CUDA_ERROR_LAUNCH_FAILED", _EXCEPTION),
    Fault(
        "cudaErrorTensorMemoryLeak",
        721,
        "tensor memory not completely freed",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "a kernel ended with tensor memory allocated, which CUDA treats as an exception on the device",
    ),
    Fault(
        "cudaErrorMpsClientTerminated",
        810,
        "the MPS client has been terminated by the server",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "the MPS server ended this process's share of the GPU, perhaps for another client's fault",
    ),
    Fault(
        "cudaErrorExternalDevice",
        911,
        "an async error has occured in external entity outside of CUDA",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "data from another device never became valid; all later CUDA work returns the same error",
    ),
    Fault(
        "cudaErrorUnknown",
        999,
        "unknown error",
        "CUDA_ERROR_UNKNOWN",
        "CUDA can't tell what went wrong, so nothing in the context can be relied on",
    ),
)
"""Every sticky error. Not here: what a launch is refused for (invalid value or configuration, out of resources), no
memory, a missing kernel image, an invalidated stream capture: the context outlives those, and another variant may work.
"""

_BY_NAME = {name: fault for fault in STICKY for name in (fault.name, fault.driver)}
_BY_CODE = {fault.code: fault for fault in STICKY}
_BY_WORDS = {fault.words.lower(): fault for fault in STICKY}
_NAME = re.compile(r"\b(?:cudaError|CUDA_ERROR_)\w+")
_CODE = re.compile(r"\berror code:? *(\d+)", re.IGNORECASE)  # CuTeDSL: "CUDA Error Code: 700", "(error code: 700)"
_WORDS = re.compile(r"\bCUDA(?: driver| runtime)? error: *([^\n]+)", re.IGNORECASE)  # torch, and whoever speaks like it
_ANSI = re.compile(r"\x1b\[[\d;]*m")
_FOREIGN = ("RuntimeError", "AcceleratorError", "DSLCudaRuntimeError", "CUDAError")


def classify(error: BaseException) -> Fault | None:
    """The sticky error that an exception tells of, itself or by its cause; None if the context may be sound.

    Where several are named, the innermost exception counts: it is nearest to CUDA.
    """
    found = None
    for link in _chain(error):
        if not isinstance(link, TunekitError) and _speaks_of_cuda(link):
            found = _of_text(words_of(link)) or found
    return found


def as_device_fault(error: BaseException, kernel: str, variant: object, device: int) -> DeviceFaultError | None:
    """The error to raise in the place of `error`, which a variant's load or launch raised; None if it isn't sticky.

    `device` is CUDA's index.
    """
    if isinstance(error, DeviceFaultError):
        return error
    fault = classify(error)
    if fault is None:
        return None
    return DeviceFaultError(
        f"{kernel} ({variant}) on CUDA device {device}: {fault.words} ({fault.name}, {fault.code}): {fault.reason}. "
        "This process's CUDA context is lost: restart the process. CUDA reports a fault late, so an earlier kernel may "
        "be to blame; CUDA_LAUNCH_BLOCKING=1 tells which"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it came from, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _speaks_of_cuda(error: BaseException) -> bool:
    """Whether an exception is of a kind by which torch, tvm_ffi or CuTeDSL report CUDA's errors.

    torch.AcceleratorError is a RuntimeError, as is what tvm_ffi raises without CuTeDSL in the process; CuTeDSL's own
    kinds derive from neither, and are known by name so that nothing of it is imported.
    """
    return any(kind.__name__ in _FOREIGN for kind in type(error).__mro__)


def _of_text(text: str) -> Fault | None:
    text = _ANSI.sub("", text)
    if "cuda" not in text.lower():
        return None
    for name in _NAME.findall(text):
        if name in _BY_NAME:
            return _BY_NAME[name]
    for code in _CODE.findall(text):
        if int(code) in _BY_CODE:
            return _BY_CODE[int(code)]
    for words in _WORDS.findall(text):
        found = _BY_WORDS.get(words.strip().rstrip(".").lower())
        if found is not None:
            return found
    return None
