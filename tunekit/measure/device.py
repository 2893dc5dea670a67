"""The device that a worker runs variants on: a CUDA GPU, or the host's CPU. Part of the device half."""

from __future__ import annotations

import gc

import torch

from tunekit.errors import words_of

PROBE_COUNT = 4096


class Device:
    """One CUDA device by index, or the host (`index` None)."""

    def __init__(self, index: int | None) -> None:
        self.index = index
        self.torch = torch.device("cpu" if index is None else f"cuda:{index}")
        if index is None:
            torch.set_num_threads(1)  # OpenMP's threads spin for a while after each use: beside a timed kernel
        elif index < torch.cuda.device_count():
            torch.cuda.set_device(index)
        else:
            raise RuntimeError(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
        self._probe = torch.arange(PROBE_COUNT, device=self.torch)
        self.synchronize()

    @property
    def is_gpu(self) -> bool:
        return self.index is not None

    @property
    def l2_bytes(self) -> int:
        """The L2 cache's size; 0 on the host."""
        if self.index is None:
            return 0
        return int(torch.cuda.get_device_properties(self.index).L2_cache_size)

    def synchronize(self) -> None:
        """Wait until all launched work has ended; raises what went wrong in it."""
        if self.index is not None:
            torch.cuda.synchronize(self.index)

    def fault(self) -> str | None:
        """Why the device can't be used any more in this process; None if a small computation comes out right.

        Frees the memory of dropped tensors on the way. The first attempt may report an earlier,
        harmless error (a refused launch) that CUDA still remembers; only what stays is a fault.
        """
        for last in (False, True):
            try:
                self.synchronize()
                self.release()
                total = int((self._probe + 1).sum())
            except RuntimeError as error:
                if last:
                    return first_line(error)
                continue
            if total == PROBE_COUNT * (PROBE_COUNT + 1) // 2:
                return None
        return "a sum of known numbers came out wrong: device memory was overwritten"

    def free_bytes(self) -> int | None:
        """Free device memory; None on the host."""
        return None if self.index is None else int(torch.cuda.mem_get_info(self.index)[0])

    def release(self) -> None:
        """Give back the device memory of all tensors that nothing refers to."""
        if self.index is not None:
            gc.collect()
            torch.cuda.empty_cache()

    def memory_words(self) -> str:
        """``1.5 of 139.7 GiB free``, or nothing on the host."""
        if self.index is None:
            return ""
        free, total = torch.cuda.mem_get_info(self.index)
        return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: torch's own, the driver's or the host's."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    words = words_of(error).lower()
    return isinstance(error, RuntimeError) and ("out of memory" in words or "can't allocate memory" in words)


def first_line(error: BaseException) -> str:
    """The error's first line: CUDA's errors go on with advice on debugging."""
    return words_of(error).partition(": ")[2].splitlines()[0]
