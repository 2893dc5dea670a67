"""CUDA graphs under capture, in which nothing may be loaded.

A thread can ask only about its own stream. A capture in the default mode ("global") also forbids every *other*
thread what might disturb it, unless that thread says, by the capture mode of its own, that it keeps to itself:
that is what a thread of ours does before it loads anything beside callers that may be capturing.
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
    import torch

    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextlib.contextmanager
def beside_captures() -> Iterator[bool]:
    """For a thread that captures nothing itself: yields whether it may load what others will call.

    It may where CUDA is not in use, and where the driver takes this thread's word that it does not meddle with
    captures (relaxed mode, given back at the end).
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        yield True
        return
    exchange = _exchange()
    mode = ctypes.c_int(RELAXED)
    if exchange is None or exchange(ctypes.byref(mode)) != 0:
        yield False
        return
    try:
        yield True
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange() -> Any:
    """The driver's function that swaps the calling thread's capture mode; None where there is none."""
    try:
        return ctypes.CDLL(DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None
