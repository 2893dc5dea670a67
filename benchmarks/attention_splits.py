"""Whether splitting the keys pays: one launch beside splits of it, and beside a launch for each KV tile and a merge.

All contestants are tunekit's own kernel for one decoded token with the same tile, so that what differs is how the
keys are shared out. ``one launch``: not split. ``cluster N``: N CTAs a row block that merge in shared memory. ``kernel
N``: N CTAs a row block, and a second launch that merges (overlapping the first one's end). ``launch a tile``: as it is
often written, one launch for each KV tile of 64 or 128 keys, each with its O (bf16) and LSE in memory, and then a
merge in torch; and without any merge, which is no attention yet. The tiles' K and V are contiguous copies made
beforehand, which favours the launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attention_peers import SPEC, lazy_call, stored_function
from contest import Call
from tunekit import identity
from tunekit.arch import Arch
from tunekit.compiling import Compiler, Unit, compile_limits, units
from tunekit.environment import environment
from tunekit.jobs import Pool
from tunekit.measure.inputs import scratch
from tunekit.model import Values, Variant
from tunekit.settings import load_settings
from tunekit.space import serves
from tunekit.spec.inputs import scalars
from tunekit.store.artifacts import ArtifactStore

KEYS = 1152
TILES = (64, 128)
"""Keys of each launch."""
CLUSTERS, KERNELS = (2, 4, 8, 16), (4, 8, 16, 32)
"""Splits: of 18 tiles of 64 keys, 16 leave one or two tiles to each CTA, 32 one."""
BASE = "one launch"

PLAIN = {"smem_p": False, "k_sub": 1, "cluster_m": 1, "rescale_log2": 0, "schedule": "static"}
TILE = {
    128: {"m_tile": 64, "pv_n_tile": 128, "kv_tile": 64, "kv_stage": 4, "kv_groups": 1, "ctas_per_sm": 1},
    256: {"m_tile": 64, "pv_n_tile": 256, "kv_tile": 64, "kv_stage": 2, "kv_groups": 1, "ctas_per_sm": 1},
}
WIDE = {"kv_tile": 64, "part_columns": 128, "cluster_m": 1, "prefetch": 0, "rescale_log2": 8}


def problems() -> Iterator[dict[str, Any]]:
    """One token, 128 heads over one, 1152 keys."""
    shape = {"heads": 128, "kv_heads": 1, "t": 1, "s_k": KEYS}
    for head_dim, shared in ((128, False), (256, False), (512, True), (512, False)):
        for batch in (1, 8, 32):
            yield {**shape, "batch": batch, "head_dim": head_dim} | ({"kv_shared": True} if shared else {})


def splits(problem: Values, arch: Arch) -> dict[str, Variant]:
    """The variants of one launch and of the splits that the rules allow, by name."""
    wanted = {BASE: (1, "none")}
    wanted |= {f"cluster {n}": (n, "cluster") for n in CLUSTERS} | {f"kernel {n}": (n, "kernel") for n in KERNELS}
    found = {name: _variant(problem, arch, count, merge) for name, (count, merge) in wanted.items()}
    return {name: variant for name, variant in found.items() if serves(SPEC, variant, problem) is None}


def _variant(problem: Values, arch: Arch, count: int, merge: str) -> Variant:
    if problem.head_dim == 512:
        name, tunables = "sm90_wide", {**WIDE, "num_splits": count, "merge": merge}
    elif count == 1:
        name, tunables = "sm90", {**TILE[problem.head_dim], **PLAIN}
    else:
        name, tunables = "sm90_split", {**TILE[problem.head_dim], "num_splits": count, "merge": merge}
    order = [tunable.name for tunable in SPEC.implementation(name).tunables]
    return identity.variant(SPEC.name, SPEC.version, name, arch.name, Values({key: tunables[key] for key in order}))


def tile_problem(problem: Values, keys: int) -> Values:
    """The problem of one launch of `keys` keys, whose outputs merge with others'."""
    return SPEC.varied(problem, {"s_k": keys, "return_lse": True})


def wanted_units(problem: Values, arch: Arch) -> dict[str, Unit]:
    """What must be compiled, by name; ``tile``: the launch of one KV tile."""
    variants = splits(problem, arch)
    whole = units(SPEC, SPEC.name, problem, list(variants.values()))
    (tile,) = units(SPEC, SPEC.name, tile_problem(problem, TILES[0]), [variants[BASE]])
    return dict(zip(variants, whole, strict=True)) | {"tile": tile}


def compile_all(given: list[dict[str, Any]], arch: Arch) -> dict[str, str]:
    """Compile what the table needs into the artifact store; what failed, and why."""
    settings = load_settings()
    wanted = {unit.key: unit for one in given for unit in wanted_units(SPEC.problem(one), arch).values()}
    with Pool(workers=settings.jobs, warm=("cutedsl",), limits=compile_limits(SPEC, settings)) as pool:
        compiler = Compiler(pool, ArtifactStore(settings.artifacts), None, environment())
        done = compiler.compile(list(wanted.values()))
        return {str(unit.variant): outcome.reason for unit, outcome in done if not outcome.ok}


def contestants(problem: Values, drawn: dict[str, Any], arch: Arch) -> dict[str, Call]:
    """name -> a call that returns o; that of ``no merge`` returns nothing to be checked."""
    ours = wanted_units(problem, arch)
    tile = ours.pop("tile")
    found = {name: lazy_call(unit.variant, unit.key, problem, drawn) for name, unit in ours.items()}
    for keys in TILES:
        launches = TileLaunches(tile, problem, drawn, keys)
        name = f"{launches.count} launches of {keys} keys"
        found[f"{name}, torch merge"] = launches.torch_merged
        found[f"{name}, no merge"] = launches
    return found


class TileLaunches:
    """One launch for each KV tile of `keys` keys, each into its own part of O and LSE."""

    def __init__(self, unit: Unit, problem: Values, drawn: dict[str, Any], keys: int) -> None:
        self.count = -(-int(problem.s_k) // keys)
        self._unit, self._problem, self._keys = unit, problem, keys
        q = drawn["q"]
        self._o = q.new_empty((self.count, *q.shape[:-1], int(problem.head_dim_v)))
        self._lse = q.new_empty((self.count, problem.batch, problem.heads, problem.t), dtype=torch.float32)
        self._drawn = drawn
        self._calls: list[Call] = []

    def __call__(self) -> None:
        """The launches alone."""
        if not self._calls:
            self._calls = list(self._bound())
        for call in self._calls:
            call()

    def _bound(self) -> Iterator[Call]:
        function = stored_function(self._unit.variant, self._unit.key)
        for place in range(self.count):
            keys = slice(place * self._keys, min((place + 1) * self._keys, int(self._problem.s_k)))
            problem = tile_problem(self._problem, keys.stop - keys.start)
            own = {name: self._drawn[name][:, keys].contiguous() for name in ("k", "v") if name in self._drawn}
            own |= {"q": self._drawn["q"], "o": self._o[place], "lse": self._lse[place], **scalars(SPEC, problem)}
            call = [own[argument.name] for argument in SPEC.arguments(problem)]
            more = scratch(SPEC, self._unit.variant, problem, self._drawn["q"].device)
            yield partial(function, *call, *more)

    def torch_merged(self) -> Any:
        self()
        weights = torch.softmax(self._lse, 0).transpose(-1, -2).unsqueeze(-1)
        return (weights * self._o).sum(0).to(self._o.dtype)


def ratios(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Each contestant's time over that of one launch; none where that has no time."""
    base = rows.get(BASE, {}).get("median_us")
    if not base:
        return {}
    return {name: row["median_us"] / base for name, row in rows.items() if "median_us" in row}
