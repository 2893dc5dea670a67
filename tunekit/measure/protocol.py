"""How a time was taken, as one string. Times under different protocols are never compared.

``final/1 cuda_graph cold_l2 random default_clocks`` reads, word by word:

stage/version
    ``search`` (cheap, while searching) or ``final`` (careful, decides a winner), and the
    version of the measuring code. The version grows with each change that moves times.
method
    ``cuda_graph``: calls replayed from one CUDA graph. ``events``: a pair of CUDA events
    around each call. ``perf_counter``: the host's clock around calls of a CPU kernel.
cache
    ``cold_l2``: no argument lies in the L2 cache when a call begins. ``warm``: it may.
data
    ``random``: standard normal. ``spec_inputs``: the spec's own generator.
clocks
    ``default_clocks``, ``clocks_1500_mhz`` (application clocks set to that), or ``host``.
"""

from __future__ import annotations

import re
from typing import Literal

VERSION = 1

Stage = Literal["search", "final"]
Method = Literal["cuda_graph", "events", "perf_counter"]


def protocol(stage: Stage, method: Method, *, cold: bool, own_inputs: bool, clocks: str) -> str:
    """The protocol's string; `clocks` comes from :func:`clocks_word`."""
    cache = "cold_l2" if cold else "warm"
    data = "spec_inputs" if own_inputs else "random"
    return f"{stage}/{VERSION} {method} {cache} {data} {clocks}"


def clocks_word(policy: str | None) -> str:
    """An environment's `clocks_policy` as one word; a policy that can't be read counts as default."""
    if policy is None or policy == "default":
        return "default_clocks"
    number = re.search(r"\d+", policy)
    return f"clocks_{number.group()}_mhz" if number else "locked_clocks"


def is_current(text: str, stage: Stage) -> bool:
    """Whether a protocol is this version's for `stage`, whatever its method and clocks."""
    return text.partition(" ")[0] == f"{stage}/{VERSION}"
