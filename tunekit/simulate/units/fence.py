"""Fences (PTX ISA 9.7.13): fence, membar and the proxy fences.

What a fence does to a warp's knowledge is in patterns.py and order.py. A fence's scope is not told apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tunekit.simulate.history.order import FENCED_GLOBAL, FENCED_SHARED
from tunekit.simulate.history.patterns import Patterns
from tunekit.simulate.machine.decode import Decoder, Step, Wait, instruction
from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.ptx import module as ptx

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp

_SEMANTICS = ("sc", "acq_rel", "acquire", "release")
_SCOPES = ("cta", "cluster", "gpu", "gl", "sys")
# Which rows a proxy fence raises, by the space it names.
_ROWS = {
    "async": (FENCED_SHARED, FENCED_GLOBAL),
    "async.global": (FENCED_GLOBAL,),
    "async.shared::cta": (FENCED_SHARED,),
    "async.shared::cluster": (FENCED_SHARED,),
}


def _step(act: Callable[[Patterns], None]) -> Step:
    def step(w: Warp, lanes: Lanes) -> Wait | None:
        act(w.part(Patterns))
        return None

    return step


@instruction("fence", "membar")
def fence(i: ptx.Instruction, d: Decoder) -> Step:
    """A thread fence. membar is fence.sc; without .sem a fence is .acq_rel."""
    semantics = "sc" if i.opcode == "membar" else "acq_rel"
    for word in i.modifiers:
        if word in _SEMANTICS:
            semantics = word
        elif word not in _SCOPES and not word.startswith("sync_restrict::"):
            raise d.unsupported(f".{word}")
    return _step(lambda patterns: patterns.fence(semantics))


@instruction("fence.mbarrier_init")
def fence_mbarrier_init(i: ptx.Instruction, d: Decoder) -> Step:
    """Publishes the warp's mbarrier.init operations, and nothing else, to later relaxed operations."""
    if i.modifiers != ("mbarrier_init", "release", "cluster"):
        raise d.unsupported("a form other than fence.mbarrier_init.release.cluster")
    return _step(Patterns.publish_initialisations)


@instruction("fence.proxy", "membar.proxy")
def fence_proxy(i: ptx.Instruction, d: Decoder) -> Step:
    """Between the generic proxy and another. Aliased addresses do not occur here, so .alias has nothing to do."""
    kind = ".".join(i.modifiers[1:])
    if kind == "alias":
        return _step(lambda patterns: None)
    rows = _ROWS.get(kind)
    if rows is None:
        raise d.unsupported(f"proxy {kind}")
    return _step(lambda patterns: patterns.proxy_fence(*rows))


@instruction("fence.proxy.async::generic")
def fence_proxy_one_way(i: ptx.Instruction, d: Decoder) -> Step:
    """From the generic to the async proxy, in shared memory, as half of a release or acquire pattern."""
    semantics = i.modifiers[2]
    if semantics not in ("acquire", "release"):
        raise d.unsupported(f".{semantics}")

    def act(patterns: Patterns) -> None:
        if semantics == "acquire":
            patterns.fence("acquire")
        patterns.proxy_fence(FENCED_SHARED)
        if semantics == "release":
            patterns.fence("release")

    return _step(act)


@instruction("fence.proxy.tensormap::generic")
def fence_proxy_tensormap(i: ptx.Instruction, d: Decoder) -> Step:
    """Between writes of a tensor map in global memory and its use by copies."""
    semantics = i.modifiers[2]
    if semantics not in ("acquire", "release"):
        raise d.unsupported(f".{semantics}")

    def act(patterns: Patterns) -> None:
        if semantics == "acquire":
            patterns.fence("acquire")
        patterns.proxy_fence(FENCED_GLOBAL)
        if semantics == "release":
            patterns.fence("release")

    return _step(act)
