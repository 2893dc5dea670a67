"""Special registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tunekit.simulate.faults import Unsupported

Run, Text = Callable[..., Any], Callable[..., str]


def values(run_ptx: Run, ptx_kernel: Text, name: str, **launch: Any) -> np.ndarray[Any, Any]:
    """What every thread of the grid reads, in the order of CTAs and threads."""
    x, y, z = launch.get("block", (32, 1, 1))
    gx, gy, gz = launch.get("grid", (1, 1, 1))
    body = f"""
    ld.param.u64 %rd1, [out];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %tid.y; mov.u32 %r3, %tid.z;
    mad.lo.u32 %r4, %r3, {y}, %r2; mad.lo.u32 %r4, %r4, {x}, %r1;
    mov.u32 %r5, %ctaid.x; mov.u32 %r6, %ctaid.y; mov.u32 %r7, %ctaid.z;
    mad.lo.u32 %r8, %r7, {gy}, %r6; mad.lo.u32 %r8, %r8, {gx}, %r5;
    mad.lo.u32 %r9, %r8, {x * y * z}, %r4;
    mul.wide.u32 %rd2, %r9, 4; add.s64 %rd3, %rd1, %rd2;
    mov.u32 %r10, {name};
    st.global.u32 [%rd3], %r10;
    ret;
    """
    out = np.full(gx * gy * gz * x * y * z, 0xFFFF, dtype=np.uint32)
    ran = run_ptx(ptx_kernel(body, ".param .u64 out"), {"out": out}, ["out"], **launch)
    assert not ran.faults
    return ran.buffers["out"].reshape(gx * gy * gz, x * y * z)


def test_threads_of_a_block_in_three_dimensions(run_ptx: Run, ptx_kernel: Text) -> None:
    block = (5, 3, 4)
    order = np.arange(60)
    for axis, wanted in zip("xyz", (order % 5, order // 5 % 3, order // 15), strict=True):
        assert values(run_ptx, ptx_kernel, f"%tid.{axis}", block=block)[0].tolist() == wanted.tolist()
    assert values(run_ptx, ptx_kernel, "%ntid.y", block=block)[0].tolist() == [3] * 60


def test_places_in_a_cluster(run_ptx: Run, ptx_kernel: Text) -> None:
    launch = {"grid": (4, 2, 1), "cluster": (2, 2, 1)}
    assert values(run_ptx, ptx_kernel, "%cluster_ctarank", **launch)[:, 0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert values(run_ptx, ptx_kernel, "%clusterid.x", **launch)[:, 0].tolist() == [0, 0, 1, 1] * 2
    assert values(run_ptx, ptx_kernel, "%cluster_ctaid.y", **launch)[:, 0].tolist() == [0] * 4 + [1] * 4
    assert values(run_ptx, ptx_kernel, "%cluster_nctarank", **launch)[0, 0] == 4


def test_warps_and_lanes(run_ptx: Run, ptx_kernel: Text) -> None:
    launch = {"block": (96, 1, 1)}
    assert values(run_ptx, ptx_kernel, "%warpid", **launch)[0].tolist() == [0] * 32 + [1] * 32 + [2] * 32
    assert set(values(run_ptx, ptx_kernel, "%nwarpid", **launch)[0].tolist()) == {3}
    lane = np.arange(32, dtype=np.uint64)
    masks = {
        "%lanemask_eq": 1 << lane,
        "%lanemask_lt": (1 << lane) - 1,
        "%lanemask_le": (2 << lane) - 1,
        "%lanemask_gt": (2**32 - 1) ^ ((2 << lane) - 1),
        "%lanemask_ge": (2**32 - 1) ^ ((1 << lane) - 1),
    }
    for name, wanted in masks.items():
        assert values(run_ptx, ptx_kernel, name)[0].tolist() == wanted.tolist(), name


def test_one_that_is_not_known_is_refused_when_it_is_reached(run_ptx: Run, ptx_kernel: Text) -> None:
    with pytest.raises(Unsupported, match=r"the special register %envreg3 \(PTX line \d+: mov"):
        run_ptx(ptx_kernel("mov.b32 %r1, %envreg3;\nret;"))
