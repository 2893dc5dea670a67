"""A kernel made ready to run: decoded once, shared by all warps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.simulate import units
from tunekit.simulate.machine.decode import Decoder, Op
from tunekit.simulate.machine.symbols import Symbols
from tunekit.simulate.ptx.control import reconvergence
from tunekit.simulate.ptx.link import linked
from tunekit.simulate.ptx.module import Kernel, Module


@dataclass(frozen=True)
class Program:
    """Steps by program counter, and where the lanes of each branch meet again (None: only at the end).

    sources: the source line of each PTX line that has one.
    """

    module: Module
    kernel: Kernel
    symbols: Symbols
    decoder: Decoder
    ops: tuple[Op, ...]
    reconvergence: tuple[int | None, ...]
    sources: Mapping[int, tuple[str, int]]

    @classmethod
    def of(
        cls, module: Module, kernel: Kernel, dynamic_bytes: int, globals_: Mapping[str, int] | None = None
    ) -> Program:
        """Decodes `kernel`, and what it calls, for a launch with `dynamic_bytes` of dynamic shared memory.

        globals_: addresses of the module's .global variables.
        """
        units.load()
        kernel = linked(module, kernel)
        symbols = Symbols.of(module, kernel, dynamic_bytes, globals_ or {})
        decoder = Decoder(module, kernel, symbols)
        ops = decoder.finish(tuple(decoder.decode(i) for i in kernel.instructions))
        sources = {i.line: i.source for i in kernel.instructions if i.source is not None}
        return cls(module, kernel, symbols, decoder, ops, tuple(reconvergence(kernel)), sources)
