"""Memory that forked processes share, at the same address in every run."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

# Where device memory begins if nothing lies there: far below what Linux gives out itself on x86-64 and AArch64, far
# above a program. The same addresses in every run make reports and parameters the same too.
BASE = 0x2000_0000_0000
FAILED = ctypes.c_void_p(-1).value


def shared_mapping(size: int) -> NDArray[np.uint8]:
    """`size` zero bytes, in whole pages, at `BASE` or else where there is room; unmapped with the last view.

    Raises:
        OSError: there is not so much memory.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    address = libc.mmap(BASE, size, protection, flags, -1, 0)
    if address == FAILED:
        raise OSError(ctypes.get_errno(), f"{size} bytes of device memory: {os.strerror(ctypes.get_errno())}")
    raw = (ctypes.c_uint8 * size).from_address(address)
    weakref.finalize(raw, libc.munmap, address, size).atexit = False  # views may live until the process ends
    return np.frombuffer(memoryview(raw), np.uint8)
