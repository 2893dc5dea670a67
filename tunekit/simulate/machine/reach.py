"""Where asynchronous work will touch memory: addresses resolved and checked when it is issued."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tunekit.simulate.machine.lanes import Lanes
from tunekit.simulate.machine.memory import Offsets, Region

if TYPE_CHECKING:
    from tunekit.simulate.machine.warp import Warp


@dataclass(frozen=True)
class Place:
    """Offsets in one region, and which of the active lanes they belong to (0-based among the active)."""

    region: Region
    offsets: Offsets
    lanes: NDArray[np.int64]


def reach(w: Warp, space: str, addresses: Offsets, size: int, lanes: Lanes, *, align: int = 0) -> list[Place]:
    """The places of `size` bytes at each active lane's address; bad ones are reported and left out.

    align: 0 for natural alignment.
    """
    found = []
    for region, offsets, chosen in w.resolve(space, addresses, lanes):
        good = w.checked(region, offsets, size, chosen, lanes, align or size)
        which = np.flatnonzero(chosen)
        if good is not None:
            which, offsets = which[good], offsets[good]
        if which.size:
            found.append(Place(region, offsets, which))
    return found
