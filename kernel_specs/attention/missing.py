"""What an attention kernel may not have (yet): each feature's name, words and problems, for one rule each.

A space's module lists what its kernel lacks: ``*not_yet("sm90", "sink", "varlen")``. To add a feature to a kernel,
build it and take its word off that list.
"""

from __future__ import annotations

from tunekit.spec import Constraint
from tunekit.spec.axes import Predicate

FEATURES: dict[str, tuple[str, Predicate]] = {
    "float16": ("float16", lambda v: v.dtype == "float16"),
    "head_dim_v": ("head_dim_v other than head_dim", lambda v: v.head_dim_v != v.head_dim),
    "lse": ("LSE beside a normalised O", lambda v: v.return_lse and v.normalize),
    "kv_shared": ("V that is K's columns", lambda v: v.kv_shared),
    "causal": ("causal mask", lambda v: v.mask in ("causal", "causal_top_left")),
    "window": ("window mask", lambda v: v.mask == "window"),
    "lengths": ("lengths", lambda v: v.has_lengths),
    "sink": ("sink", lambda v: v.has_sink),
    "sources": ("second source", lambda v: v.sources == 2),
    "gather": ("gathered source", lambda v: v.gather),
    "paged": ("paged keys", lambda v: v.page > 0),
    "varlen": ("packed sequences", lambda v: v.varlen),
}
MERGE: tuple[str, Predicate] = ("unnormalised outputs for merging", lambda v: not v.normalize)
"""Every kernel of our own has these; libraries don't."""


def not_yet(kernel: str, *features: str) -> tuple[Constraint, ...]:
    """A rule ``not_yet_<feature>`` for each feature that a kernel lacks."""
    return tuple(_rule(kernel, feature, *FEATURES[feature]) for feature in features)


def never(library: str, *features: str) -> tuple[Constraint, ...]:
    """A rule ``no_<feature>`` for each feature that somebody else's library does not offer."""
    known = {**FEATURES, "merge": MERGE}
    return tuple(_absent(library, feature, *known[feature]) for feature in features)


def _absent(library: str, feature: str, words: str, needs: Predicate) -> Constraint:
    return Constraint(f"no_{feature}", f"{library} has no {words}", lambda v: not needs(v))


def _rule(kernel: str, feature: str, words: str, needs: Predicate) -> Constraint:
    return Constraint(f"not_yet_{feature}", f"the {kernel} kernel has no {words} yet", lambda v: not needs(v))
