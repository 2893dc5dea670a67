"""A bench for the tensor core: tcgen05 instructions run with registers, shared and tensor memory laid by the test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.machine.cluster import Cluster, ClusterResult
from tunekit.simulate.machine.cta import Cta
from tunekit.simulate.machine.decode import Wait
from tunekit.simulate.machine.program import Program
from tunekit.simulate.matrix import descriptor_sm100
from tunekit.simulate.matrix.layout import Place, addresses, chunk_addresses
from tunekit.simulate.numbers.formats import decode, encode
from tunekit.simulate.ptx.read import read_module
from tunekit.simulate.units.tcgen05.state import Allocation, tensor

SHARED = 100 * 1024
TYPE_BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e2m1": 4, "e2m3": 6, "e3m2": 6}


class Bench:
    """One cluster that runs `text` (the body of a kernel) in its first CTA's first warp, or in all of them."""

    def __init__(
        self, text: str, ctas: int = 1, threads: int = 128, shared: int = SHARED, seed: int = 0, strict: bool = False
    ) -> None:
        module = read_module(f"""
            .version 8.8
            .target sm_100a
            .address_size 64
            .visible .entry kernel()
            {{
            .reg .pred %p<16>;
            .reg .b32 %r<400>;
            .reg .b64 %rd<32>;
            .reg .b16 %rs<8>;
            {text}
            exit;
            }}
        """)
        kernel = module.kernels["kernel"]
        self.program = Program.of(module, kernel, shared)
        launch = Launch("kernel", (ctas, 1, 1), (threads, 1, 1), (ctas, 1, 1), shared, {}, ())
        self.cluster = Cluster(self.program, launch, 0, [], seed=seed, strict=strict)
        self.result: ClusterResult | None = None

    @property
    def cta(self) -> Cta:
        return self.cluster.ctas[0]

    def set(self, values: Mapping[str, Any], cta: int | None = None, warp: int | None = None) -> None:
        """Fills registers (with a number, or one a lane) of all warps, or of a CTA's, or of the warps of a number."""
        slots = {name: slot for slot, name in self.program.decoder.names.items()}
        for each in self.cluster.warps:
            if cta in (None, each.cta.rank) and warp in (None, each.number):
                for name, value in values.items():
                    slot = slots[name]
                    each.fill(slot, self.program.decoder.widths[slot], value)

    def get(self, register: str, warp: int = 0, cta: int = 0) -> np.ndarray:
        slots = {name: slot for slot, name in self.program.decoder.names.items()}
        return self.cluster.ctas[cta].warps[warp].array(slots[register]).copy()

    def allocate(self, columns: int = 512) -> None:
        """Tensor memory as if allocated, in every CTA, and freed by nobody (so that no leak is reported)."""
        for cta in self.cluster.ctas:
            state = tensor(cta)
            state.take(Allocation(0, columns, 1, self.program.kernel.instructions[0]))
            state.allocations.clear()

    def write_shared(self, offsets: np.ndarray, octets: np.ndarray, cta: int = 0) -> None:
        memory = self.cluster.ctas[cta].shared
        memory.write(np.asarray(offsets, dtype=np.int64), octets, None)
        memory.shadow.initialised[(np.asarray(offsets)[..., None] + np.arange(octets.shape[-1])).reshape(-1)] = True

    def words(self, cta: int = 0) -> np.ndarray:
        return tensor(self.cluster.ctas[cta]).memory.words

    def write_tensor(self, lanes: Any, columns: Any, words: np.ndarray, cta: int = 0) -> None:
        memory = tensor(self.cluster.ctas[cta]).memory
        memory.words[lanes, columns] = words
        memory.initialised[lanes, columns] = True

    def matrix(self, place: Place, bits: np.ndarray, element: str, major: str = "k", cta: int = 0) -> int:
        """Puts an operand's bit patterns [rows, k] into shared memory; returns its descriptor."""
        rows, k = bits.shape
        width = TYPE_BITS.get(element, 8)
        if width >= 8:
            where = addresses(place, rows, k, width, major)
            octets = np.ascontiguousarray(bits.astype(f"u{width // 8}")).view(np.uint8).reshape(rows, k, width // 8)
            self.write_shared(where, octets, cta)
        else:
            where = chunk_addresses(place, rows, k, 8, "k")
            self.write_shared(where, padded(bits, width)[:, :, : 2 * width], cta)  # nobody writes the padding
        return descriptor_sm100.encode(place)

    def matrix4(self, place: Place, bits: np.ndarray, cta: int = 0) -> int:
        """An operand of the mxf4 kinds: two elements a byte."""
        rows, k = bits.shape
        octets = (bits[:, 0::2] | bits[:, 1::2] << 4).astype(np.uint8).reshape(rows, k // 32, 16)
        self.write_shared(chunk_addresses(place, rows, k, 4, "k"), octets, cta)
        return descriptor_sm100.encode(place)

    def only_the_first_issues(self) -> None:
        """The other CTAs do nothing, and exit after the first."""
        last = len(self.program.ops) - 1
        for cta in self.cluster.ctas[1:]:
            for warp in cta.warps:
                fragment = warp.fragments[0]
                fragment.pc, fragment.wait = last, Wait("the first CTA", lambda: self.cta.done, again=True)

    def run(self) -> None:
        self.result = self.cluster.run()

    @property
    def faults(self) -> list[str]:
        return [f"{fault.kind.value}: {fault.message}" for fault in self.cluster.faults.all()]


def padded(bits: np.ndarray, width: int) -> np.ndarray:
    """Elements of 4 or 6 bits, 16 packed into the 8 or 12 bytes that start each 16: uint8[rows, k / 16, bytes]."""
    rows, k = bits.shape
    flat = (bits[:, :, None] >> np.arange(width) & 1).astype(np.uint8).reshape(rows, k // 16, 16 * width)
    return np.packbits(flat, axis=-1, bitorder="little")


def draw(rng: np.random.Generator, rows: int, k: int, element: str) -> tuple[np.ndarray, np.ndarray]:
    """(bit patterns, values) of a random operand; no NaN or infinity."""
    if element in ("u8", "s8"):
        bits = rng.integers(0, 256, (rows, k)).astype(np.uint8)
        return bits, bits.view(np.int8 if element == "s8" else np.uint8).astype(np.float64)
    if element in ("f16", "bf16", "tf32"):
        bits = encode(rng.standard_normal((rows, k)).astype(np.float32), element)
    else:
        bits = rng.integers(0, 1 << TYPE_BITS.get(element, 8), (rows, k)).astype(np.uint8)
        for _ in range(20):
            odd = ~np.isfinite(decode(bits, element))
            bits[odd] = rng.integers(0, 64, int(odd.sum()))
    return bits, decode(bits, element).astype(np.float64)
