"""Sticky CUDA errors: told from harmless ones in the words of all who report them."""

from __future__ import annotations

import pytest
import torch

from tunekit.dispatch.faults import STICKY, as_device_fault, classify
from tunekit.errors import DeviceFaultError, NoKernelError, TunekitError, UserError

STICKY_CODES = [fault.code for fault in STICKY]
HARMLESS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    9: ("cudaErrorInvalidConfiguration", "invalid configuration argument"),
    98: ("cudaErrorInvalidDeviceFunction", "invalid device function"),
    209: ("cudaErrorNoKernelImageForDevice", "no kernel image is available for execution on the device"),
    701: ("cudaErrorLaunchOutOfResources", "too many resources requested for launch"),
    720: ("cudaErrorCooperativeLaunchTooLarge", "too many blocks in cooperative launch"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    912: ("cudaErrorInvalidClusterSize", "a kernel launch error has occurred due to cluster misconfiguration"),
}
ADVICE = (
    "Search for `{name}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information.\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
    "might be incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    "Device-side assertion tracking was not enabled by user."
)


class DSLCudaRuntimeError(Exception):
    """As nvidia-cutlass-dsl's: a plain Exception, known by its name."""


class CUDADialectError(DSLCudaRuntimeError):
    """As nvidia-cutlass-dsl's, which it raises in the place of tvm_ffi's RuntimeError once it is imported."""


def reports(code: int, name: str, words: str) -> dict[str, BaseException]:
    """How one error reaches Python: by each library in its own words."""
    dsl = (
        f"\n\x1b[91m\x1b[1merror:\x1b[0m {name} (error code: {code}) \n \n\n\x1b[0m\n"
        f"  \x1b[94m= note:\x1b[0m error code {code}\n- \x1b[1mError name: {name}\n- Error code: {code}\n"
        "- CUDA_TOOLKIT_PATH: not set\n"
    )
    return {
        "torch": torch.AcceleratorError(f"CUDA error: {words}\n{ADVICE.format(name=name)}"),
        "torch before it named them": RuntimeError(f"CUDA error: {words}\nCUDA kernel errors might be asynchronously"),
        "the kernels' run-time library, through tvm_ffi": RuntimeError(f"CUDA Error Code: {code}"),
        "CuTeDSL": CUDADialectError(dsl),
    }


@pytest.mark.parametrize("fault", STICKY, ids=[fault.name for fault in STICKY])
def test_a_sticky_error_is_known_in_everybodys_words(fault):
    for who, error in reports(fault.code, fault.name, fault.words).items():
        assert classify(error) is fault, who
    assert classify(RuntimeError(f"CUDA driver error: {fault.words}")) is fault
    assert classify(RuntimeError(f"cuLaunchKernelEx failed: {fault.driver}")) is fault


@pytest.mark.parametrize("code", HARMLESS, ids=[name for name, _ in HARMLESS.values()])
def test_an_error_that_the_context_survives_is_none(code):
    for who, error in reports(code, *HARMLESS[code]).items():
        assert classify(error) is None, who
        assert as_device_fault(error, "fmha", "sm90", 0) is None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("the worker ended: error code 700"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB"),
        ValueError("CUDA error: an illegal memory access was encountered"),
        UserError("'k' is on cpu, but 'q' is on cuda:0"),
        NoKernelError("CUDA error: an illegal memory access was encountered"),
        KeyError("cudaErrorIllegalAddress"),
    ],
)
def test_what_only_speaks_of_one_is_none(error):
    """Only what torch, tvm_ffi and CuTeDSL raise reports CUDA's state; and a number alone says nothing."""
    assert classify(error) is None


def test_a_cause_counts_and_so_does_a_context():
    """A kernel's module that fails to load arrives wrapped; a clean-up that fails, after it."""
    deep = RuntimeError("CUDA Error Code: 719")
    try:
        try:
            raise deep
        except RuntimeError as error:
            raise TunekitError("kernel.so can't be loaded") from error
    except TunekitError as wrapped:
        assert classify(wrapped).name == "cudaErrorLaunchFailure"
    try:
        try:
            raise deep
        except RuntimeError:
            raise KeyError("cleaning up") from None
    except KeyError as hidden:
        assert classify(hidden) is None
    deep.__cause__ = deep
    assert classify(deep).code == 719


def test_the_fatal_error_says_what_where_and_the_way_out():
    error = as_device_fault(RuntimeError("CUDA Error Code: 700"), "fmha", "sm90 m_tile=128", 1)
    assert isinstance(error, DeviceFaultError) and not isinstance(error, UserError)
    for words in (
        "fmha (sm90 m_tile=128) on CUDA device 1",
        "an illegal memory access was encountered (cudaErrorIllegalAddress, 700)",
        "This process's CUDA context is lost: restart the process",
    ):
        assert words in str(error)
    assert as_device_fault(error, "another", "variant", 0) is error


def test_the_table_is_cudas_own():
    """Names, numbers and words as CUDA's run-time and driver libraries give them; each with a reason."""
    driver = pytest.importorskip("cuda.bindings.driver")
    runtime = pytest.importorskip("cuda.bindings.runtime")
    assert len(set(STICKY_CODES)) == len(STICKY)
    newest = {int(value) for value in runtime.cudaError_t}  # older CUDA lacks the last ones
    known = [fault for fault in STICKY if fault.code in newest]
    assert len(known) > 12
    for fault in known:
        value = runtime.cudaError_t(fault.code)
        assert runtime.cudaGetErrorName(value)[1].decode() == fault.name
        assert runtime.cudaGetErrorString(value)[1].decode() == fault.words
        assert int(getattr(driver.CUresult, fault.driver)) == fault.code
        assert fault.reason
    for code, (name, words) in HARMLESS.items():
        value = runtime.cudaError_t(code)
        assert (runtime.cudaGetErrorName(value)[1].decode(), runtime.cudaGetErrorString(value)[1].decode()) == (
            name,
            words,
        )


@pytest.mark.parametrize("code", [1, 700, 721])
def test_the_kernels_own_run_time_library_speaks_so(code):
    """The words that exported kernels raise come from the installed library, through the function that they call."""
    import ctypes

    from tunekit.backends.load import runtime_library

    library = runtime_library()
    if library is None:
        pytest.skip("nvidia-cutlass-dsl is not installed")
    said: list[str] = []
    receiver = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p), ctypes.c_int32)
    take = receiver(lambda kind, parts, count: said.append("".join(parts[i].decode() for i in range(count))))
    raise_error = ctypes.CDLL(str(library)).CuteDSLRT_TVMFFISetRaisedCudaError
    raise_error.argtypes, raise_error.restype = [receiver, ctypes.c_int32], None
    raise_error(take, code)
    fault = classify(RuntimeError(said[0]))
    assert (fault.code if fault else None) == (code if code in STICKY_CODES else None), said
