"""How a time was taken, as one string. Times under different protocols are never compared.

``final/2 cuda_graph flush_l2 random default_clocks`` reads, word by word:

stage/version
    ``search`` (cheap, while searching) or ``final`` (careful, decides a winner), and the
    version of the measuring code. The version grows with each change that moves times.
    1: ``cold_l2`` was rotation or, where the arguments were too small for that, a flush.
method
    ``cuda_graph``: calls replayed from one CUDA graph. ``events``: a pair of CUDA events
    around each call. ``perf_counter``: the host's clock around calls of a CPU kernel. What
    the method itself adds is measured and taken off (fact ``host_us``).
cache
    ``flush_l2``: 4 L2 sizes of other memory are read before each call: its arguments, its code and
    its constants lie in no cache, as where other kernels run between two of its calls.
    ``rotate_l2``: calls rotate over so many copies of the arguments that these lie in no
    cache; code, constants and page tables may, as in a loop over one kernel.
    ``warm``: all may lie in the cache.
data
    ``random``: standard normal. ``spec_inputs``: the spec's own generator.
clocks
    ``default_clocks``, ``clocks_1500_mhz`` (application clocks set to that), or ``host``.
"""

from __future__ import annotations

import re
from typing import Literal

VERSION = 2

Stage = Literal["search", "final"]
Method = Literal["cuda_graph", "events", "perf_counter"]
Cache = Literal["flush", "rotate", "warm"]
CACHES: dict[Cache, str] = {"flush": "flush_l2", "rotate": "rotate_l2", "warm": "warm"}
DEFAULT_CACHE: Cache = "flush"


def protocol(stage: Stage, method: Method, *, cache: Cache, own_inputs: bool, clocks: str) -> str:
    """The protocol's string; `clocks` comes from :func:`clocks_word`."""
    data = "spec_inputs" if own_inputs else "random"
    return f"{stage}/{VERSION} {method} {CACHES[cache]} {data} {clocks}"


def clocks_word(policy: str | None) -> str:
    """An environment's `clocks_policy` as one word; a policy that can't be read counts as default."""
    if policy is None or policy == "default":
        return "default_clocks"
    number = re.search(r"\d+", policy)
    return f"clocks_{number.group()}_mhz" if number else "locked_clocks"


def is_current(text: str, stage: Stage) -> bool:
    """Whether a protocol is this version's for `stage`, whatever its method and clocks."""
    return text.partition(" ")[0] == f"{stage}/{VERSION}"


def searched_alike(text: str, cache: Cache) -> bool:
    """Whether a search's time by protocol `text` may stand beside those of a search with `cache` now.

    A search flushes for ``rotate`` as for ``flush``; the host has no cache mode.
    """
    words = text.split()
    if not is_current(text, "search") or len(words) < 3:
        return False
    return words[1] == "perf_counter" or (words[2] == CACHES["warm"]) == (cache == "warm")
