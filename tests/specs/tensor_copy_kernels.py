"""PTX of one-warp kernels that move one box, for a GPU and for the simulator: the bytes must agree."""

from __future__ import annotations

TILE_BYTES = 16384
FILL = 0xC3C3C3C3  # what the tile holds before a load
TIMEOUT = 1 << 20  # polls of the mbarrier, after which the kernel gives up and says so

_HEAD = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .align 64 .b8 map[128], .param .u64 out, .param .u32 size, .param .u32 start,
    .param .u32 c0, .param .u32 c1, .param .u32 c2, .param .u32 c3, .param .u32 c4)
{
.reg .pred %p<8>;
.reg .b32 %r<40>;
.reg .b64 %rd<12>;
.shared .align 1024 .b8 tile[16384];
.shared .align 8 .b64 full;
mov.u32 %r0, %tid.x;
mov.u32 %r1, tile;
mov.u32 %r2, full;
mov.b64 %rd1, map;
cvta.param.u64 %rd1, %rd1;
ld.param.u32 %r3, [start];
add.u32 %r3, %r1, %r3;
ld.param.u32 %r4, [c0];
ld.param.u32 %r5, [c1];
ld.param.u32 %r6, [c2];
ld.param.u32 %r7, [c3];
ld.param.u32 %r8, [c4];
ld.param.u32 %r9, [size];
setp.ne.u32 %p0, %r0, 0;
shl.b32 %r20, %r0, 2;
"""
_TAIL = "ret;\n}\n"
_LOOP = """
mov.u32 %r21, %r20;
{name}:
add.u32 %r22, %r1, %r21;
{body}
add.u32 %r21, %r21, 128;
setp.lt.u32 %p1, %r21, 16384;
@%p1 bra {name};
"""
_COORDINATES = ("%r4", "%r5", "%r6", "%r7", "%r8")


def _tensor(rank: int) -> str:
    return f"[%rd1, {{{', '.join(_COORDINATES[:rank])}}}]"


def load(rank: int) -> str:
    """Fills the tile, loads the box at (c0, ...) to tile + start, and writes the tile and a word of success to out."""
    fill = _LOOP.format(name="FILL", body=f"mov.u32 %r23, {FILL};\nst.shared.u32 [%r22], %r23;")
    dump = (
        "ld.shared.u32 %r23, [%r22];\ncvt.u64.u32 %rd3, %r21;\nadd.u64 %rd4, %rd2, %rd3;\nst.global.u32 [%rd4], %r23;"
    )
    name = f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    return f"""{_HEAD}{fill}
@%p0 bra READY;
mbarrier.init.shared.b64 [%r2], 1;
READY:
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 bra ISSUED;
mbarrier.arrive.expect_tx.shared.b64 %rd5, [%r2], %r9;
{name} [%r3], {_tensor(rank)}, [%r2];
ISSUED:
mov.u32 %r25, 0;
POLL:
mbarrier.test_wait.parity.shared.b64 %p2, [%r2], 0;
@%p2 bra ARRIVED;
add.u32 %r25, %r25, 1;
setp.lt.u32 %p3, %r25, {TIMEOUT};
@%p3 bra POLL;
ARRIVED:
ld.param.u64 %rd2, [out];
{_LOOP.format(name="DUMP", body=dump)}
selp.u32 %r26, 1, 0, %p2;
@!%p0 st.global.u32 [%rd2+{TILE_BYTES}], %r26;
{_TAIL}"""


def store(rank: int, operation: str = "") -> str:
    """Copies `out`, 16,384 bytes, to the tile and stores or reduces the box at tile + start to (c0, ...)."""
    name = f"cp.{'reduce.' if operation else ''}async.bulk.tensor.{rank}d.global.shared::cta"
    name += f".{operation}.tile.bulk_group" if operation else ".tile.bulk_group"
    return _out_of_shared(f"{name} {_tensor(rank)}, [%r3];")


def prefetch(rank: int) -> str:
    """Prefetches the box at (c0, ...)."""
    return _out_of_shared(f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile {_tensor(rank)};")


def _out_of_shared(copy: str) -> str:
    take = (
        "cvt.u64.u32 %rd3, %r21;\nadd.u64 %rd4, %rd2, %rd3;\nld.global.u32 %r23, [%rd4];\nst.shared.u32 [%r22], %r23;"
    )
    return f"""{_HEAD}
ld.param.u64 %rd2, [out];
{_LOOP.format(name="TAKE", body=take)}
fence.proxy.async.shared::cta;
bar.sync 0;
@%p0 bra DONE;
{copy}
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
DONE:
{_TAIL}"""
