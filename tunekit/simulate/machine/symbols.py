"""Where a kernel's variables and parameters lie: addresses fixed before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tunekit.simulate.machine.memory import CONST_BASE, PARAM_BASE, RESERVED_SHARED_BYTES
from tunekit.simulate.ptx.module import Kernel, Module, Variable


@dataclass(frozen=True)
class Place:
    """A variable's space ("shared", "local", "param", "const", "global") and address.

    shared and local: the offset in the CTA's shared or the thread's local memory; the others: the generic address.
    """

    space: str
    address: int


@dataclass(frozen=True)
class Symbols:
    """Addresses of all names a kernel can mention, and the sizes they add up to.

    shared_bytes is the end of static and dynamic shared memory, the 1,024 reserved bytes included; dynamic_start is
    where dynamic shared memory begins.
    """

    places: Mapping[str, Place]
    shared_bytes: int
    dynamic_start: int
    local_bytes: int
    parameter_bytes: int
    const_bytes: int

    @classmethod
    def of(cls, module: Module, kernel: Kernel, dynamic_bytes: int, globals_: Mapping[str, int]) -> Symbols:
        """globals_: addresses of the module's .global variables."""
        places: dict[str, Place] = {}
        every = (*module.variables, *kernel.variables)
        shared = RESERVED_SHARED_BYTES
        for variable in every:
            if variable.space == "shared" and not _dynamic(variable):
                shared = _up(shared, variable.align)
                places[variable.name] = Place("shared", shared)
                shared += variable.size
        extern = [variable for variable in every if variable.space == "shared" and _dynamic(variable)]
        dynamic = _up(shared, max([variable.align for variable in extern], default=16))
        for variable in extern:
            places[variable.name] = Place("shared", dynamic)
        # .param variables of a body hold the arguments of its calls: each thread has its own (7.1).
        thread_owned = [v for v in every if v.space in ("local", "param")]
        # The lanes' local memories lie one after the other, each aligned for its strictest variable.
        local = _up(_lay(places, thread_owned, "local", 0), max([v.align for v in thread_owned], default=1))
        constants = _lay(places, [v for v in every if v.space == "const"], "const", CONST_BASE)
        parameters = _lay(places, list(kernel.parameters), "param", PARAM_BASE)
        for name, address in globals_.items():
            places[name] = Place("global", address)
        end = dynamic + dynamic_bytes if dynamic_bytes else shared
        return cls(places, end, dynamic, local, parameters - PARAM_BASE, constants - CONST_BASE)


def parameter_offsets(kernel: Kernel) -> list[int]:
    """Byte offset of each parameter in the parameter block, each aligned as declared."""
    places: dict[str, Place] = {}
    _lay(places, list(kernel.parameters), "param", 0)
    return [places[parameter.name].address for parameter in kernel.parameters]


def _dynamic(variable: Variable) -> bool:
    return variable.extern or variable.size == 0


def _lay(places: dict[str, Place], variables: list[Variable], space: str, start: int) -> int:
    end = start
    for variable in variables:
        end = _up(end, variable.align)
        places[variable.name] = Place(space, end)
        end += variable.size
    return end


def _up(value: int, align: int) -> int:
    return -(-value // align) * align
