"""Kernels run by the driver API, in a context of the first GPU; without one, the test is skipped."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]


@contextlib.contextmanager
def driver_context(compute_capability: int | None = None, why: str = "") -> Iterator[Any]:
    """cuda-python's driver module, in the first GPU's primary context.

    compute_capability: skip on a GPU of another major number, since `why`.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        pytest.skip(f"needs cuda-python: {error}")
    success = driver.CUresult.CUDA_SUCCESS
    try:
        (error,) = driver.cuInit(0)
    except RuntimeError as missing:  # no driver library
        pytest.skip(f"needs a CUDA driver: {missing}")
    if error != success:
        pytest.skip(f"needs a CUDA GPU: cuInit returns {error}")
    error, device = driver.cuDeviceGet(0)
    assert error == success
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
    _, major = driver.cuDeviceGetAttribute(attribute, device)
    if compute_capability not in (None, major):
        pytest.skip(f"{why} compute capability {compute_capability}, not {major}")
    error, context = driver.cuDevicePrimaryCtxRetain(device)
    assert error == success
    driver.cuCtxPushCurrent(context)
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(device)


class Gpu:
    """Runs one CTA of a kernel, with the arguments of the simulator's fixture."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def ok(self, returned: tuple[Any, ...]) -> Any:
        error, *values = returned
        assert error == self.driver.CUresult.CUDA_SUCCESS, error
        return values[0] if values else None

    def run(
        self,
        text: str,
        buffers: Mapping[str, Array],
        parameters: Sequence[str | bytes],
        block: tuple[int, int, int],
        shared: int = 0,
    ) -> dict[str, Array]:
        """The buffers afterwards. parameters: a buffer's name for its address, or bytes."""
        d = self.driver
        module = self.ok(d.cuModuleLoadData(text.encode() + b"\0"))
        kernel = self.ok(d.cuModuleGetFunction(module, b"kernel"))
        attribute = d.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.ok(d.cuFuncSetAttribute(kernel, attribute, shared))
        sources = {name: np.ascontiguousarray(array) for name, array in buffers.items()}
        places = {name: self.ok(d.cuMemAlloc(source.nbytes)) for name, source in sources.items()}
        for name, source in sources.items():
            self.ok(d.cuMemcpyHtoD(places[name], source.ctypes.data, source.nbytes))
        values = [p if isinstance(p, bytes) else int(places[p]).to_bytes(8, "little") for p in parameters]
        room = [ctypes.create_string_buffer(value, len(value)) for value in values]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(place) for place in room))
        self.ok(d.cuLaunchKernel(kernel, 1, 1, 1, *block, shared, 0, ctypes.addressof(pointers), 0))
        self.ok(d.cuCtxSynchronize())
        after = {}
        for name, source in sources.items():
            after[name] = np.empty_like(source)
            self.ok(d.cuMemcpyDtoH(after[name].ctypes.data, places[name], source.nbytes))
            self.ok(d.cuMemFree(places[name]))
        self.ok(d.cuModuleUnload(module))
        return after
