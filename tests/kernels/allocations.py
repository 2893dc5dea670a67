"""Tracing kernels no further than to their allocations: whether those are what is declared, in a tenth of a trace.

A kernel allocates shared memory and TMEM near its beginning, and its operation has the launch's threads and cluster
from the start; a trace spends its time on what comes after, and on loops. So a trace is cut as soon as what there is of
the kernel holds what is declared, read by the code that reads whole traces; and loops are traced empty. What a kernel
might allocate after that, or in a loop, isn't seen: a trace that doesn't come to hold what is declared must be repeated
whole, and so must a sample of those that do.

`run` is a task's entry (tunekit.jobs): it needs a process that it may spoil.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tunekit.arch import parse_arch
from tunekit.backends import backend
from tunekit.backends.contract import CompileRequest
from tunekit.compiling import Unit
from tunekit.jobs import Limits, Task
from tunekit.model import Footprint, to_json
from tunekit.spec import Build, load_spec

ENTRY = "tests.kernels.allocations:run"
LIMITS = Limits(trace_s=600.0, memory_bytes=4 * 2**30)
KERNEL = "cuda.kernel"
ALLOCATING = ("cute.memref.alloca", "cute_nvgpu.arch.alloc_smem", "cute_nvgpu.arch.sm100.alloc_tmem")
REGISTERS = ", rmem"  # in the type of memory
# Attributes of a kernel while it is traced (nvidia-cutlass-dsl 4.8.1): facts of its launch; shared memory asked for.
LAUNCH_FACTS, LAUNCH_SMEM = "cutlass_launch_facts", "smem.config_smem_size"


def task(id: str, units: Sequence[Unit], out_dir: str) -> Task:
    """Traces `units` in one process; its value's ``held`` is how many came to hold what is declared, up to the first
    that did not."""
    traces = [
        {"request": unit.request(out_dir, trace_only=True).to_payload(), "declared": to_json(unit.declared)}
        for unit in units
    ]
    return Task(id, {"traces": traces}, ENTRY, context=f"{len(units)} kernels of {units[0].variant}", limits=LIMITS)


class Held(Exception):
    """The kernel that is being traced holds what is declared of it."""


def run(payload: Mapping[str, Any], phase: Callable[[str], None]) -> dict[str, Any]:
    """Trace ``traces`` in order until one doesn't come to hold what is declared. Changes CuTeDSL for good."""
    phase("trace")
    watch = Watch()
    watch.install()
    gc.disable()
    left = []
    for number, trace in enumerate(payload["traces"]):
        request = CompileRequest.from_payload(trace["request"])
        implementation = load_spec(request.spec).implementation(request.implementation)
        arch = parse_arch(request.arch)
        watch.expect(Footprint(**trace["declared"]))
        try:
            backend(implementation.backend).compile(
                request, implementation, Build(arch, request.static, request.tunables), lambda *_: None
            )
        except Exception as error:
            # CuTeDSL wraps what is raised; the watch remembers. What a cut trace leaves must outlive its MLIR context:
            # freed after it, it takes the process along.
            left.append(error)
        if not watch.held:
            return {"held": number}
    return {"held": len(payload["traces"])}


class Watch:
    """Looks at the kernel that is being traced whenever it allocates."""

    def __init__(self) -> None:
        self.held = False
        self._declared = Footprint()

    def expect(self, declared: Footprint) -> None:
        """From now on look for a kernel of this footprint."""
        self.held, self._declared = False, declared

    def install(self) -> None:
        """Make every allocating operation report here, and leave the bodies of loops out."""
        from cutlass._mlir.dialects import _cute_nvgpu_ops_gen, _cute_ops_gen
        from cutlass.base_dsl.ast_helpers import Executor

        for dialect in (_cute_ops_gen, _cute_nvgpu_ops_gen):
            for kind in vars(dialect).values():
                if getattr(kind, "OPERATION_NAME", None) in ALLOCATING and hasattr(kind, "build_generic"):
                    self._watch(kind)
        for_execute = Executor.for_execute
        Executor.for_execute = lambda self, body, *range_, **more: for_execute(self, _unchanged, *range_, **more)

    def _watch(self, kind: Any) -> None:
        made = kind.__init__

        def make(op: Any, *given: Any, **more: Any) -> None:
            made(op, *given, **more)
            # Registers are "allocated" by the same operation, hundreds of times.
            if not any(REGISTERS in str(result.type) for result in op.operation.results):
                self._look(op.operation)

        kind.__init__ = make

    def _look(self, op: Any) -> None:
        """Raises: Held."""
        from tunekit.backends.cutedsl.traced import allocations, required_threads

        while op is not None and op.name != KERNEL:
            op = op.parent and op.parent.operation
        if op is None or LAUNCH_SMEM in op.attributes:
            return
        found = allocations(op)
        footprint = Footprint(found.smem_bytes, found.tmem_columns, required_threads(op), _cluster(op))
        if footprint == self._declared:
            self.held = True
            raise Held


def _cluster(kernel: Any) -> int | None:
    """CTAs of the launch's cluster; None if that isn't one number."""
    from tunekit.backends.cutedsl.ir import product

    facts = kernel.attributes[LAUNCH_FACTS]
    if "exact_cluster_dim" in facts:
        return product(facts["exact_cluster_dim"])
    return None if facts["cluster_launch"].value else 1


def _unchanged(_: Any, *carried: Any) -> Any:
    """The body of a loop that does nothing."""
    return list(carried)
