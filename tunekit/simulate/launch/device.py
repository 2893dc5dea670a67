"""What host code may ask about the device: answered for the simulated architecture."""

from __future__ import annotations

from tunekit.arch import Arch

# cudaDeviceAttr (CUDA 13.0, driver_types.h).
MAX_THREADS_PER_BLOCK = 1
WARP_SIZE = 10
MAX_REGISTERS_PER_BLOCK = 12
MULTIPROCESSOR_COUNT = 16
MAX_THREADS_PER_MULTIPROCESSOR = 39
COMPUTE_CAPABILITY_MAJOR = 75
COMPUTE_CAPABILITY_MINOR = 76
MAX_REGISTERS_PER_MULTIPROCESSOR = 82
COOPERATIVE_LAUNCH = 95
MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97
RESERVED_SHARED_MEMORY_PER_BLOCK = 111
CLUSTER_LAUNCH = 120
# CUfunction_attribute (CUDA 13.0, cuda.h).
FUNCTION_SHARED_SIZE_BYTES = 1

# Multiprocessors of the largest product of each architecture, as NVIDIA's data sheets give them:
# H100/H200 SXM, B200, B300, Thor, RTX PRO 6000 Blackwell, GB10.
MULTIPROCESSORS = {"sm_90a": 132, "sm_100a": 148, "sm_103a": 160, "sm_110a": 20, "sm_120a": 188, "sm_121a": 48}


def device_attributes(arch: Arch) -> dict[int, int]:
    """cudaDeviceAttr to value, for those that are known.

    Registers and threads per multiprocessor: CUDA C++ Programming Guide 13.0, "Technical Specifications".
    """
    return {
        MAX_THREADS_PER_BLOCK: arch.threads,
        WARP_SIZE: 32,
        MAX_REGISTERS_PER_BLOCK: 65_536,
        MULTIPROCESSOR_COUNT: MULTIPROCESSORS[arch.name],
        MAX_THREADS_PER_MULTIPROCESSOR: 1536 if arch.compute_capability[0] >= 11 else 2048,
        COMPUTE_CAPABILITY_MAJOR: arch.compute_capability[0],
        COMPUTE_CAPABILITY_MINOR: arch.compute_capability[1],
        MAX_REGISTERS_PER_MULTIPROCESSOR: 65_536,
        COOPERATIVE_LAUNCH: 1,
        MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: arch.smem_bytes,
        RESERVED_SHARED_MEMORY_PER_BLOCK: 1024,
        CLUSTER_LAUNCH: 1,
    }
