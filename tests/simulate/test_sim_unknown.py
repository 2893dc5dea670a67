"""Modifiers that a unit does not know are refused, wherever they stand: never ignored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tunekit.simulate.faults import Unsupported
from tunekit.simulate.machine.decode import Op
from tunekit.simulate.machine.program import Program
from tunekit.simulate.ptx.read import read_module

# One form at least of each family whose meaning hangs on modifiers.
FORMS = """
bar.sync 0;
bar.arrive 1, 64;
bar.red.popc.u32 %r1, 0, %p1;
bar.warp.sync 0xffffffff;
barrier.cta.sync.aligned 0;
barrier.cluster.arrive.relaxed.aligned;
barrier.cluster.wait.acquire.aligned;
mapa.shared::cluster.u32 %r1, %r2, 0;
getctarank.shared::cluster.u32 %r1, %r2;
clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r2];
mbarrier.init.shared::cta.b64 [%r1], 1;
mbarrier.inval.shared::cta.b64 [%r1];
mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 16;
mbarrier.arrive.release.cta.shared::cta.b64 %rd1, [%r1];
mbarrier.arrive_drop.shared.b64 %rd1, [%r1];
mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r1], 0;
mbarrier.pending_count.b64 %r1, %rd1;
cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
cp.async.cg.shared.global.L2::128B [%r1], [%rd1], 16;
cp.async.commit_group;
cp.async.wait_group 0;
cp.async.wait_all;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r1], 16;
st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r1], %r2, [%r3];
red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r1], %r2, [%r3];
st.bulk.weak.shared::cta [%r1], 16, 0;
ld.relaxed.gpu.global.b32 %r1, [%rd1];
st.release.gpu.global.b32 [%rd1], %r1;
atom.add.release.gpu.global.u32 %r1, [%rd1], 1;
fence.acq_rel.gpu;
fence.proxy.async.shared::cta;
fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster;
fence.proxy.tensormap::generic.release.gpu;
fence.mbarrier_init.release.cluster;
ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%r1}, [%r2];
stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r2], {%r1};
vote.sync.ballot.b32 %r1, %p1, 0xffffffff;
match.any.sync.b32 %r1, %r2, 0xffffffff;
redux.sync.add.s32 %r1, %r2, 0xffffffff;
shfl.sync.idx.b32 %r1, %r2, 0, 31, 0xffffffff;
elect.sync _|%p1, 0xffffffff;
activemask.b32 %r1;
setmaxnreg.dec.sync.aligned.u32 40;
nanosleep.u32 20;
prefetch.global.L2 [%rd1];
wgmma.fence.sync.aligned;
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;
tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;
tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r1}, [%r2];
tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r1};
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
tcgen05.cp.cta_group::1.128x256b [%r1], %rd1;
tcgen05.shift.cta_group::1.down [%r1];
tcgen05.mma.cta_group::1.kind::f16 [%r1], %rd1, %rd2, %r2, %p1;
tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1];
add.sat.s32 %r1, %r2, %r3;
setp.lt.s32 %p1, %r1, %r2;
trap;
exit;
""".strip().splitlines()


def _refused(op: Op) -> bool:
    """A step that refuses does so before it looks at its warp."""
    nothing: Any = None
    try:
        op.step(nothing, nothing)
    except Unsupported:
        return True
    except (AttributeError, TypeError):
        pass
    return False


@pytest.mark.parametrize("form", FORMS)
def test_an_unknown_modifier_is_refused(form: str, ptx_kernel: Callable[..., str]) -> None:
    module = read_module(ptx_kernel(form))
    program = Program.of(module, module.kernels["kernel"], 0)
    op = program.ops[0]
    assert not _refused(op)
    i = op.instruction
    for place in range(len(i.modifiers) + 1):
        odd = dataclasses.replace(i, modifiers=(*i.modifiers[:place], "unheard_of", *i.modifiers[place:]))
        assert _refused(program.decoder.decode(odd)), f"{odd.dotted} is accepted"
