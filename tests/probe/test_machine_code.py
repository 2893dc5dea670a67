"""Reading footprints from text and bytes, without a compiler."""

from __future__ import annotations

import pytest

pytest.importorskip("elftools")

from tunekit.backends.cutedsl.compiled import tmem_columns, wgmma_serialized

ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 \t[%r2], {};"


@pytest.mark.parametrize(
    ("ptx", "columns"),
    [
        ("", 0),
        ("\tmov.b32 \t%r8, 64;\n\t" + ALLOC.format("%r8"), 64),
        ("\t" + ALLOC.format("256"), 256),
        ("\tmov.b32 \t%r8, 512;\n\t" + ALLOC.format("%r8") + "\n\tmov.b32 \t%r9, 32;\n\t" + ALLOC.format("%r9"), 544),
        ("\tadd.s32 \t%r8, %r1, %r2;\n\t" + ALLOC.format("%r8"), None),
    ],
)
def test_tmem_columns(ptx, columns):
    """The columns of all allocations; unknown if one is computed at run time."""
    assert tmem_columns(ptx) == columns


REMARK = """
          ptxas output:
          ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are
          serialized due to insufficient register resources for the function
          'kernel_cutlass__kernel'
          ptxas info    : 0 bytes gmem
"""
TOUCHED = "non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage"
IN_FUNCTION = (
    "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
    f"{TOUCHED} in the function 'kernel'"
)


@pytest.mark.parametrize(
    ("log", "because"),
    [
        ("ptxas info    : 0 bytes gmem", None),
        (REMARK, "insufficient register resources"),
        (IN_FUNCTION, TOUCHED),
    ],
)
def test_serialized_wgmma_is_read_from_the_log(log, because):
    assert wgmma_serialized(log) == because
