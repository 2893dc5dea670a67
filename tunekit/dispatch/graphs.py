"""CUDA graphs under capture, in which nothing may be loaded.

A thread can ask only about its own stream. A capture in the default mode ("global") also forbids every *other*
thread what might disturb it (loading code, allocating), unless that thread says, by the capture mode of its own, that
it keeps to itself: that is what a call's cold path does, and a thread of ours before it loads anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Iterator
from typing import Any

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
DRIVER = "libcuda.so.1"


def capturing() -> bool:
    """Whether a CUDA graph is being captured on this thread's stream."""
    torch = _torch_on_cuda()
    return torch is not None and bool(torch.cuda.is_current_stream_capturing())


@contextlib.contextmanager
def beside_captures() -> Iterator[bool]:
    """Meanwhile, what this thread loads and allocates breaks no other thread's capture: its mode is relaxed, given
    back at the end. Where CUDA is not in use this does nothing.

    Yields whether that holds. Where the driver does not take this thread's word, a thread of ours must not load; what a
    caller wants is done all the same.
    """
    if _torch_on_cuda() is None:
        yield True
        return
    exchange = _exchange()
    mode = ctypes.c_int(RELAXED)  # the driver puts the old one there
    try:
        yield exchange is not None and exchange(ctypes.byref(mode)) == 0
    finally:  # also where Ctrl-C came just after the exchange
        if mode.value != RELAXED:
            exchange(ctypes.byref(mode))


def _torch_on_cuda() -> Any:
    """torch, where this process uses CUDA through it: nobody else captures here. Imports and initialises nothing."""
    torch = sys.modules.get("torch")  # without its cuda while another thread imports it
    return torch if torch and hasattr(torch, "cuda") and torch.cuda.is_initialized() else None


@functools.cache
def _exchange() -> Any:
    """The driver's function that swaps the calling thread's capture mode; None where there is none."""
    try:
        return ctypes.CDLL(DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
