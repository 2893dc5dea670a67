"""Numbers and values as text, each with its unit."""

from __future__ import annotations

from tunekit.model import Footprint, Values, Variant


def seconds(value: float | None) -> str:
    """``0.13 s``, ``12 s``, ``3 min 05 s``; empty for None."""
    if value is None:
        return ""
    if value < 10:
        return f"{value:.2f} s"
    if value < 100:
        return f"{value:.1f} s"
    return f"{int(value) // 60} min {int(value) % 60:02d} s"


def microseconds(value: float | None) -> str:
    """``12.34 us``; empty for None."""
    return "" if value is None else f"{value:.2f} us"


def count(value: int | None) -> str:
    """An integer with its thousands set apart; empty for None."""
    return "" if value is None else f"{value:,}"


def mebibytes(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:,.0f} MiB"


def footprint(value: Footprint) -> str:
    """What is known of a footprint, on one line."""
    parts = (
        (value.smem_bytes, "B smem"),
        (value.tmem_columns, "TMEM columns"),
        (value.threads, "threads"),
        (value.cluster, "CTAs a cluster"),
        (value.registers, "registers"),
        (value.spill_bytes, "B spilled"),
        (value.local_bytes, "B local"),
    )
    return ", ".join(f"{number:,} {unit}" for number, unit in parts if number is not None) or "not known"


def accuracy(figures: Values) -> str:
    """How near the oracle results came, on one line; empty where nothing finite was compared."""
    if "cosine" not in figures:
        return ""
    ratio = f", {figures['rounding_ratio']:.3g} times the rounded oracle's" if "rounding_ratio" in figures else ""
    return (
        f"cosine {figures['cosine']:.8f}, relative norm error {figures['relative_norm']:.2e}{ratio}, "
        f"largest error {figures['max_abs_error']:.2e}"
    )


def label(variant: Variant) -> str:
    """``1a2b3c4d5e6f fmha_sm90 kv_stage=2``: an id to paste, and what it stands for."""
    return f"{variant.id} {variant}"
