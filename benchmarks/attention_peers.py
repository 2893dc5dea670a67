"""Who computes an attention problem: tunekit, and what else does, faster or not. Part of benchmarks/attention.py.

A contestant is a call without arguments that returns o as [batch, t, heads, head_dim_v].
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import tunekit
from contest import Call
from tunekit.backends import symbol_of
from tunekit.backends.load import load_artifact
from tunekit.environment import environment
from tunekit.measure.inputs import Arguments
from tunekit.model import Values, Variant
from tunekit.settings import load_settings
from tunekit.spec import load_spec
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.database import Store
from tunekit.store.standing import comparable
from tunekit.sweep.measuring import FINAL_MARGIN
from tunekit.trials import Stage, Trial

SPEC = load_spec("fmha")
STATED = ("heads", "kv_heads", "head_dim", "head_dim_v")
"""Static axes that the tensors of a call state."""


def contestants(problem: Values, arguments: Arguments) -> tuple[dict[str, Call], str]:
    """name -> call; and which variant "own kernel" is."""
    given = {name: one.tensor for name, one in arguments.guarded.items() if one.argument.role == "input"}
    flags = {
        axis.name: problem[axis.name]
        for axis in SPEC.axes
        if axis.static and axis.kind != "dtype" and axis.name not in STATED
    }
    kernel = tunekit.load("fmha")
    found: dict[str, Call] = {"tunekit": lambda: kernel(**given, **flags)}
    own = own_kernel(problem, arguments.drawn)
    if own is not None:
        found["own kernel"] = own[1]
    found |= dict(peers(problem, given))
    return found, str(own[0]) if own else "none measured"


def own_kernel(problem: Values, drawn: Mapping[str, Any]) -> tuple[Variant, Call] | None:
    """The fastest of tunekit's own kernels by what sweeps recorded in this environment; None if there is none."""
    settings, here = load_settings(), environment()
    with Store.open(settings.database) as store:
        trials = store.trials(spec=SPEC.name, arch=here.arch, stage=Stage.MEASURE, problem=problem)
    artifacts = ArtifactStore(settings.artifacts)
    for trial in ranked([t for t in trials if comparable(t.environment) == comparable(here)]):
        if artifacts.get(trial.compile_key) is not None:
            return trial.variant, lazy_call(trial.variant, trial.compile_key, problem, drawn)
    return None


def ranked(trials: list[Trial]) -> list[Trial]:
    """The trials of own kernels, fastest first, one for each kernel.

    By the times of the final for those that are close in the search; the default races too, however slow. Times of
    search and final are taken by different methods, and so never compared.
    """
    own = [t for t in trials if t.outcome.ok and SPEC.implementation(t.variant.implementation).backend == "cutedsl"]
    newest = {(t.protocol.startswith("final/"), t.compile_key): t for t in own}
    median = {place: statistics.median(t.outcome.samples_us) for place, t in newest.items()}
    leader = min((us for (final, _), us in median.items() if not final), default=math.inf)

    def rank(key: str) -> tuple[bool, float]:
        searched = median.get((False, key), leader)
        close = (True, key) in median and searched <= FINAL_MARGIN * leader
        return not close, median[True, key] if close else searched

    keys = sorted({key for _, key in newest}, key=rank)
    return [newest.get((True, key)) or newest[False, key] for key in keys]


def lazy_call(variant: Variant, key: str, problem: Values, drawn: Mapping[str, Any]) -> Call:
    """A call that loads its kernel when it is first made, so that one that can't be loaded is refused alone."""
    loaded: list[Call] = []

    def call() -> Any:
        if not loaded:
            loaded.append(compiled_call(variant, key, problem, drawn))
        return loaded[0]()

    return call


def compiled_call(variant: Variant, key: str, problem: Values, drawn: Mapping[str, Any]) -> Call:
    """A call of a stored artifact on arguments of its own that hold `drawn`."""
    function = stored_function(variant, key)
    arguments = Arguments(SPEC, problem, drawn, torch.device("cuda"), variant=variant)
    return partial(_run, function, arguments.call, arguments.guarded["o"].tensor)


def stored_function(variant: Variant, key: str) -> Any:
    """The kernel of a stored artifact."""
    artifacts = ArtifactStore(load_settings().artifacts)
    artifact = artifacts.get(key)
    if artifact is None:
        raise RuntimeError(f"{variant} is not in {artifacts.root}")
    return load_artifact(artifacts.path(artifact), symbol_of(key))


def _run(function: Any, call: tuple[Any, ...], o: Any) -> Any:
    function(*call)
    return o


def peers(problem: Values, given: Mapping[str, Any]) -> Iterator[tuple[str, Call]]:
    """What else computes the same problem."""
    if problem.t == 1 and problem.head_dim > 256:
        yield "bmm, softmax, bmm", partial(unfused, problem, given)
    if problem.sources > 1 or problem.gather or problem.has_lengths or problem.has_sink:
        return
    q, k = given["q"], given["k"]
    v = k[..., : problem.head_dim_v] if problem.kv_shared else given["v"]
    if problem.head_dim <= 256:
        yield from flash_attn_4(problem, q, k, v)
    yield from sdpa(problem, q, k, v)


def flash_attn_4(problem: Values, q: Any, k: Any, v: Any) -> Iterator[tuple[str, Call]]:
    """Its public function, everything left to its heuristics."""
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return

    def call() -> Any:
        out = flash_attn_func(q, k, v, causal=problem.mask == "causal")
        return out[0] if isinstance(out, tuple) else out

    yield "flash-attn-4", call


def sdpa(problem: Values, q: Any, k: Any, v: Any) -> Iterator[tuple[str, Call]]:
    """torch's scaled_dot_product_attention: cuDNN and FA2 where they take the head dim, else what torch chooses."""
    qt, kt, vt = (x.transpose(1, 2) for x in (q, k, v))
    grouped, causal = problem.heads != problem.kv_heads, problem.mask == "causal"
    packed = packed_rows(problem, q)
    backends: dict[str, list[SDPBackend]] = {
        "cuDNN": [SDPBackend.CUDNN_ATTENTION],
        "FA2": [SDPBackend.FLASH_ATTENTION],
    }
    if problem.head_dim > 256:
        backends = {"torch SDPA": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]}

    def whole(backend: list[SDPBackend]) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(qt, kt, vt, enable_gqa=grouped, is_causal=causal).transpose(1, 2)

    def heads_packed(backend: list[SDPBackend]) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(packed, kt, vt).reshape(qt.shape).transpose(1, 2)

    for name, backend in backends.items():
        if problem.head_dim <= 256 or not grouped:  # beyond, it would write K and V out for every query head
            yield name, partial(whole, backend)
        if grouped and problem.t == 1:
            yield f"{name}, heads packed", partial(heads_packed, backend)


def packed_rows(problem: Values, q: Any) -> Any:
    """q of one token as [batch, kv_heads, heads of each, head_dim]: a KV head's query heads are rows of one head."""
    return q.reshape(problem.batch, problem.kv_heads, -1, problem.head_dim)


def unfused(problem: Values, given: Mapping[str, Any]) -> Any:
    """One token's attention by two products and a softmax a source; lengths are taken as full, so nothing is masked but
    what a list leaves out."""
    q = packed_rows(problem, given["q"])
    scores, values = [], []
    for name in ("", "2") if problem.sources == 2 else ("",):
        k = given[f"k{name}"]
        v = k if problem.kv_shared else given[f"v{name}"]
        listed = given["indices"][:, 0] if problem.gather and name == ("2" if problem.sources == 2 else "") else None
        if listed is not None:
            rows = listed.clamp(min=0).long()[..., None, None].expand(-1, -1, *k.shape[2:])
            k = k.gather(1, rows)
            v = k if problem.kv_shared else v.gather(1, rows)
        score = problem.head_dim**-0.5 * (q @ k.permute(0, 2, 3, 1))
        if listed is not None:
            score = score.masked_fill((listed < 0)[:, None, None], -torch.inf)
        scores.append(score)
        values.append(v[..., : problem.head_dim_v].transpose(1, 2))
    if problem.has_sink:
        sink = given["sink"].to(q.dtype).reshape(1, problem.kv_heads, -1, 1)
        scores.append(sink.expand(problem.batch, -1, -1, -1))
    weights = torch.softmax(torch.cat(scores, -1) if len(scores) > 1 else scores[0], -1, dtype=torch.float32)
    parts = weights.to(q.dtype).split([score.shape[-1] for score in scores], -1)
    o = sum(part @ v for part, v in zip(parts, values, strict=False))
    return o.reshape(problem.batch, 1, problem.heads, -1)
