"""``tunekit.start_cuda``: a GPU's context, made by a thread while the process imports what it needs."""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time

from tunekit.dispatch import graphs
from tunekit.dispatch.forked import Guard, renew
from tunekit.environment import environment
from tunekit.errors import UserError, words_of

logger = logging.getLogger("tunekit")

# Of what `import torch` brings, what follows its shared libraries. (Mapping these and making a context want the same
# lock of the address space: an import of 1250 ms took 1300 beside a context, 1250 beside one that was made after them;
# H200, medians of 22, 2026-12-01.)
AFTER_LIBRARIES = "torch.nn"
LONGEST_WAIT_S = 20.0


class Starter:
    """The devices that were asked for, each started once. A forked child may ask again."""

    def __init__(self) -> None:
        self._guard = Guard()
        self._asked: set[int] = set()
        renew(self)

    def start(self, device: int) -> None:
        with self._guard:
            if device in self._asked:
                return
            self._asked.add(device)
        # No daemon: a process that ends while the driver starts would crash, so its end waits.
        thread = threading.Thread(target=_start, args=(device,), name="tunekit-start", daemon=False)
        try:
            thread.start()
        except RuntimeError as error:  # no thread to be had
            logger.info("CUDA device %d is not started ahead: %s", device, error)

    def after_fork(self) -> None:
        self._asked.clear()


_starter = Starter()


def start_cuda(device: int = 0) -> None:
    """Have the context of a GPU made in a thread, and return at once: for a process that imports torch next.

    Making it takes 0.15 s and more, which the import then hides. It is the device's primary context, which torch uses
    too, kept to the process's end. `device` is CUDA's index among those that CUDA_VISIBLE_DEVICES leaves; the driver
    reads that variable now, so changing it later has no effect. Imports neither torch nor CUDA's run-time library.

    Do not fork after this and use CUDA in the child: CUDA does not work in a process whose parent had started it.

    Whatever fails here (no driver, no such GPU, no memory) is left to the first real use, which raises it.

    Raises:
        UserError: `device` is no index.
    """
    if type(device) is not int or not 0 <= device < 2**31:
        raise UserError(f"device is {device!r}; it must be CUDA's index of a GPU, 0 for the first")
    _starter.start(device)


def _start(device: int) -> None:
    """Retain a primary context by the driver alone and ask NVML for the GPU's facts: calls that let go of the GIL."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    try:
        driver = ctypes.CDLL(graphs.DRIVER)
        failed = driver.cuInit(0)
        if not failed and not _torch_is_mapped():
            return
        failed = (
            failed
            or driver.cuDeviceGet(ctypes.byref(handle), device)
            or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
        )
        if failed:
            logger.info("CUDA device %d is not started ahead: the driver says %d", device, failed)
        else:
            environment(device)  # is kept, and the first call's lookup wants it
    except Exception as error:  # no driver, or another's library; a broken NVML
        logger.info("CUDA device %d is not started ahead: %s", device, words_of(error))


def _torch_is_mapped() -> bool:
    """If torch is being imported, wait until its libraries are mapped; False if the process ends first."""
    latest = time.monotonic() + LONGEST_WAIT_S
    while sys.modules.get("torch") and AFTER_LIBRARIES not in sys.modules and time.monotonic() < latest:
        if not threading.main_thread().is_alive():
            return False
        time.sleep(0.005)
    return True
