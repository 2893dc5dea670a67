"""Cases that are compiled when they are first asked for, and made ready to simulate."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunekit import identity
from tunekit.arch import parse_arch
from tunekit.backends.contract import CompileRequest
from tunekit.jobs import Limits, Pool, Task
from tunekit.model import Values
from tunekit.simulate.launch.arguments import CallArguments, arguments_of
from tunekit.simulate.launch.capture import capture_object
from tunekit.simulate.launch.launch import Launch
from tunekit.simulate.ptx.module import Module
from tunekit.simulate.ptx.read import read_module
from tunekit.spec import load_spec

SYMBOL = "tunekit_it"


@dataclass(frozen=True)
class Case:
    spec: str
    implementation: str
    static: dict[str, Any]
    tunables: dict[str, Any]
    axes: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def compiling(cases: Mapping[str, Case], arch: str, root: Path) -> Iterator[Callable[[str], Path]]:
    """compiled(name): the directory of a case's files, below `root`."""
    places: dict[str, Path] = {}
    with Pool(workers=1, warm=("cutedsl",), limits=Limits(60, 120, 8 * 2**30)) as pool:

        def compiled(name: str) -> Path:
            if name not in places:
                case, place = cases[name], root / str(len(places))
                place.mkdir()
                spec, tunables = load_spec(case.spec), Values(case.tunables)
                static = spec.static(spec.problem({**case.static, **case.axes}))
                request = CompileRequest(case.spec, case.implementation, arch, static, tunables, SYMBOL, str(place))
                (result,) = pool.run([Task(id=name, payload=request.to_payload())])
                assert result.value is not None and result.status == "ok", f"{result.id}: {result.reason}"
                places[name] = place
            return places[name]

        yield compiled


@dataclass(frozen=True)
class Prepared:
    """What to simulate, on which arguments, and what the outputs should be."""

    launches: tuple[Launch, ...]
    module: Module
    arguments: CallArguments
    wanted: Mapping[str, Any]


def prepare(
    case: Case, place: Path, arch: str, seed: int, change: Callable[[str], str] = lambda text: text
) -> Prepared:
    """The compiled case of `place` on the inputs of `seed`; `change` edits the PTX."""
    spec = load_spec(case.spec)
    problem = spec.problem({**case.static, **case.axes})
    variant = identity.variant(spec.name, spec.version, case.implementation, arch, Values(case.tunables))
    arguments = arguments_of(spec, problem, seed, variant)
    given = dict(arguments.drawn)
    if case.spec == "fmha":
        given["scale"] = case.static["head_dim"] ** -0.5
    module = read_module(change((place / "kernel.ptx").read_text()))
    launches = capture_object(place / "kernel.o", SYMBOL, arguments.call, parse_arch(arch), module)
    return Prepared(launches, module, arguments, spec.reference(problem, given))
