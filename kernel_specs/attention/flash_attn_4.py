"""Attention by flash-attn-4 (4.0.0b36): its forward kernels for Hopper and for Blackwell, each with its own knobs.

The knobs are those of its `_flash_attn_fwd`, the only function that takes them and the outputs' tensors; it is not
part of its public interface, so `build` looks whether it is still there. It compiles what a call needs when it is first
called: seconds, in each process.

What the rules let through was compared with the oracle in the simulator, on both architectures (tests/peers). There is
one finding: on Hopper nothing fences the row-wise loads of pages (cp.async) from the wgmma that reads them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from tunekit.model import Values
from tunekit.spec import Build, Constraint, Implementation, Tunable

from .missing import never
from .signature import argument_names

PACKAGE = "flash-attn-4"
PARAMETERS = frozenset(
    {
        *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "max_seqlen_q", "page_table", "softmax_scale"),
        *("causal", "window_size_left", "window_size_right", "learnable_sink", "out", "lse"),
        *("tile_mn", "mma_pv_is_rs", "intra_wg_overlap", "num_splits", "pack_gqa"),
    }
)
# A tile of this many rows, or columns, is chosen by the library.
CHOSEN = 0

# Hopper: registers of a thread of an MMA warp group for its parts of S, P and O, by the number of warp groups; and
# the bytes for Q or O, two stages of K and V, and P (sm90_config_search.py of the package).
SM90_REGISTERS = {1: 216, 2: 216, 3: 128}
SM90_SMEM_BYTES = 224 * 1024

SM90_TUNABLES = (
    Tunable("tile_m", (CHOSEN, 64, 128, 192)),
    Tunable("tile_n", (CHOSEN, 64, 80, 96, 128, 176)),
    Tunable("mma_pv_is_rs", (True, False)),
    Tunable("intra_wg_overlap", (True, False)),
    Tunable("pack_gqa", (True, False)),
)
SM100_TUNABLES = (
    Tunable("tile_n", (128, 64)),
    Tunable("num_splits", (CHOSEN, 1, 2, 4, 8, 16, 32)),
    Tunable("pack_gqa", (True, False)),
)


def _group(v: Values) -> int:
    return int(v.heads // v.kv_heads)


def _rows(v: Values) -> int:
    """The rows of one tile's heads."""
    return int(v.t * (_group(v) if v.pack_gqa else 1))


def _sm90_tile_n(v: Values) -> int:
    if v.tile_n != CHOSEN:
        return int(v.tile_n)
    return 128 if v.head_dim <= 128 else (64 if v.mask == "window" else 80)


def _sm90_registers_fit(v: Values) -> bool:
    scores, output = v.tile_n // 2, v.head_dim_v // 2
    probabilities = scores // 2 if v.intra_wg_overlap else 0
    return bool(scores + output + probabilities <= SM90_REGISTERS[v.tile_m // 64])


def _sm90_smem_fits(v: Values) -> bool:
    widest = max(v.head_dim, v.head_dim_v)
    elements = v.tile_m * widest + 2 * v.tile_n * (v.head_dim + v.head_dim_v)
    elements += 0 if v.mma_pv_is_rs else v.tile_m * v.tile_n
    return bool(2 * elements <= SM90_SMEM_BYTES)


def _both(tile_n: Callable[[Values], int]) -> tuple[Constraint, ...]:
    """The rules that hold on both architectures; `tile_n` tells the rows of a tile of K and V."""
    return (
        *never(PACKAGE, "merge", "sources", "gather"),
        Constraint("sink_in_lse", "its LSE counts the sink", lambda v: not (v.has_sink and v.return_lse)),
        Constraint(
            "unread_tail",
            "it loads whole tiles and multiplies what lies past a length with P = 0: NaN there would reach O. Only "
            "pages of another size than a tile are loaded row by row",
            lambda v: not v.has_lengths or (v.page > 0 and v.page != tile_n(v)),
        ),
        Constraint(
            "square_top_left",
            "it aligns the last query with the last key: causal_top_left is the same only if every sequence has "
            "t == s_k",
            lambda v: v.mask != "causal_top_left" or (v.t == v.s_k and not v.varlen and not v.has_lengths),
        ),
        Constraint("pack_heads", "there is one head a KV head", lambda v: not v.pack_gqa or _group(v) > 1),
        Constraint(
            "unpacked_rows",
            "of under 64 queries one head alone leaves most of a tile empty: heads are packed",
            lambda v: v.pack_gqa or _group(v) == 1 or v.t >= 64,
        ),
    )


SM90_CONSTRAINTS = (
    *_both(_sm90_tile_n),
    Constraint(
        "head_dims",
        "on Hopper it takes head_dim up to 256, and V no wider than K",
        lambda v: v.head_dim_v <= v.head_dim <= 256,
    ),
    Constraint("whole_tile", "it chooses both sides of a tile, or none", lambda v: (v.tile_m == 0) == (v.tile_n == 0)),
    Constraint(
        "chosen_flags",
        "with its own tile it chooses mma_pv_is_rs and intra_wg_overlap too",
        lambda v: v.tile_m != CHOSEN or (v.mma_pv_is_rs and v.intra_wg_overlap),
    ),
    Constraint(
        "one_flag",
        "at most one of mma_pv_is_rs and intra_wg_overlap is off",
        lambda v: v.mma_pv_is_rs or v.intra_wg_overlap,
    ),
    Constraint(
        "rows_to_fill",
        "a tile of more rows than there are is partly empty: at most the next multiple of 64",
        lambda v: v.tile_m <= -(-_rows(v) // 64) * 64,
    ),
    Constraint("few_rows", "tiles of 64 rows are for few of them", lambda v: v.tile_m != 64 or _rows(v) <= 256),
    Constraint(
        "registers",
        "S, P and O must fit the registers of a warp group's threads",
        lambda v: v.tile_m == CHOSEN or _sm90_registers_fit(v),
    ),
    Constraint(
        "smem",
        f"Q, two stages of K and V, and P must fit {SM90_SMEM_BYTES} bytes",
        lambda v: v.tile_m == CHOSEN or _sm90_smem_fits(v),
    ),
)
SM100_CONSTRAINTS = (
    *_both(lambda v: int(v.tile_n)),
    Constraint(
        "head_dims",
        "on Blackwell it takes head_dim and head_dim_v up to 128, or 256 for both",
        lambda v: max(v.head_dim, v.head_dim_v) <= 128 or v.head_dim == v.head_dim_v == 256,
    ),
    Constraint(
        "split_dims",
        "it splits the keys only where head_dim == head_dim_v",
        lambda v: v.num_splits == 1 or v.head_dim == v.head_dim_v,
    ),
    Constraint(
        "split_keys",
        "a split needs a tile of keys",
        lambda v: v.num_splits <= 1 or (v.num_splits - 1) * v.tile_n < v.s_k,
    ),
)


def build(b: Build) -> Callable[..., None]:
    """The function of the problem's arguments, in the signature's order."""
    from flash_attn.cute.interface import _flash_attn_fwd as forward

    lacking = sorted(PARAMETERS - set(inspect.signature(forward).parameters))
    if lacking:
        raise RuntimeError(f"its _flash_attn_fwd no longer takes {', '.join(lacking)} (known: {PACKAGE} 4.0.0b36)")
    p, options = b.problem, _options(b)
    names, columns = argument_names(p), slice(int(p.head_dim_v))

    def flash_attention(*arguments: Any) -> None:
        given = dict(zip(names, arguments, strict=True))
        left, right = given.get("left", -1), given.get("right", -1)
        forward(
            given["q"],
            given["k"],
            given["k"][..., columns] if p.kv_shared else given["v"],
            cu_seqlens_q=given.get("cu_seqlens_q"),
            cu_seqlens_k=given.get("cu_seqlens_k"),
            seqused_k=given.get("lengths"),
            max_seqlen_q=given.get("max_t"),
            page_table=given.get("page_table"),
            softmax_scale=given["scale"],
            window_size_left=None if left < 0 else left,
            window_size_right=None if right < 0 else right,
            learnable_sink=given.get("sink"),
            out=given["o"],
            lse=given.get("lse"),
            **options,
        )

    return flash_attention


def _options(b: Build) -> dict[str, Any]:
    """What stays the same for all calls: the mask and the knobs, None where the library chooses."""
    chosen = b.tunables
    options = {"causal": b.problem.mask in ("causal", "causal_top_left"), "pack_gqa": chosen.pack_gqa}
    if "num_splits" in chosen:
        tile_mn = None if chosen.tile_n == 128 else (128, chosen.tile_n)
        return {**options, "tile_mn": tile_mn, "num_splits": chosen.num_splits}
    if chosen.tile_m == CHOSEN:
        return options
    flags = {name: chosen[name] for name in ("mma_pv_is_rs", "intra_wg_overlap")}
    return {**options, "tile_mn": (chosen.tile_m, chosen.tile_n), **flags}


def _implementation(
    name: str, feature: str, tunables: tuple[Tunable, ...], constraints: tuple[Constraint, ...], default: dict[str, Any]
) -> Implementation:
    return Implementation(
        name=name,
        requires={feature},
        backend="library",
        package=PACKAGE,
        install="tunekit[flash-attn-4]",
        tunables=tunables,
        constraints=constraints,
        build=build,
        defaults=({**default, "pack_gqa": True}, {**default, "pack_gqa": False}),
    )


# The defaults leave everything to its own heuristics.
flash_attn_4_sm90 = _implementation(
    "flash_attn_4_sm90",
    "wgmma",
    SM90_TUNABLES,
    SM90_CONSTRAINTS,
    {"tile_m": CHOSEN, "tile_n": CHOSEN, "mma_pv_is_rs": True, "intra_wg_overlap": True},
)
flash_attn_4_sm100 = _implementation(
    "flash_attn_4_sm100", "tcgen05", SM100_TUNABLES, SM100_CONSTRAINTS, {"tile_n": 128, "num_splits": CHOSEN}
)
