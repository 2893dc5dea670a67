"""Random inputs, poison and guard bands."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tunekit.arch import ARCHES
from tunekit.measure.device import Device
from tunekit.measure.inputs import Arguments
from tunekit.measure.inputs import scratch as scratch_of
from tunekit.measure.verify import Case, Oracle
from tunekit.oracle.patterns import bits, poison
from tunekit.space import expand
from tunekit.spec import Axis, Implementation, KernelSpec, ScalarArg, TensorArg, Tunable
from tunekit.spec.axes import DTYPES
from tunekit.spec.inputs import draw

HOST = torch.device("cpu")


def spec_of(inputs=None):
    return KernelSpec(
        name="anything",
        version=1,
        axes=(Axis("n", default=300), Axis("dtype", kind="dtype", values=DTYPES, default="bfloat16")),
        signature=(
            TensorArg("x", ("n", 4), "dtype"),
            ScalarArg("scale", default=lambda p: 1 / p.n),
            TensorArg("acc", ("n",), "dtype", role="inout"),
            ScalarArg("count", default=lambda p: p.n, dtype="int32"),
            TensorArg("y", ("n", 4), "dtype", role="output"),
            TensorArg("only_wide", ("n",), "float32", when=lambda p: p.dtype == "float64"),
        ),
        implementations=(
            Implementation(
                name="i",
                requires=(),
                tunables=(Tunable("t", (1,)),),
                build=lambda b: "",
                defaults=({"t": 1},),
            ),
        ),
        reference=lambda p, i: {},
        inputs=inputs,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_are_random_and_repeatable(dtype):
    spec = spec_of()
    problem = spec.problem({"dtype": dtype})
    first, again, other = (draw(spec, problem, seed, HOST) for seed in (0, 0, 1))
    assert set(first) == {"x", "acc"} | ({"only_wide"} if dtype == "float64" else set())
    assert torch.equal(bits(first["x"]), bits(again["x"]))
    assert not torch.equal(bits(first["x"]), bits(other["x"]))
    values = first["x"].double()
    assert torch.isfinite(values).all()
    assert (values != 0).float().mean() > 0.9 and values.std() > 0.5, "random, never zeros"
    assert first["x"].dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_call_has_the_signatures_order_and_poisoned_outputs(dtype):
    spec = spec_of()
    problem = spec.problem({"dtype": dtype})
    arguments = Arguments(spec, problem, draw(spec, problem, 0, HOST), HOST)
    x, scale, acc, count, y = arguments.call[:5]
    assert scale == torch.tensor(1 / 300).item() and type(scale) is float, "rounded to float32, as the kernel gets it"
    assert count == 300 and type(count) is int
    assert x.shape == y.shape == (300, 4) and acc.shape == (300,)
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 64 == 0 for tensor in (x, acc, y))
    assert set(arguments.outputs()) == {"acc", "y"}
    for launch in (1, 2):
        arguments.reset(launch)
        assert (bits(y) == poison(y.dtype, launch)).all()
    assert arguments.damage() is None


def test_damage_says_what_and_where():
    spec = spec_of()
    problem = spec.problem({})
    arguments = Arguments(spec, problem, draw(spec, problem, 0, HOST), HOST)
    x, _, acc, _, y = arguments.call
    acc.fill_(1)
    y.fill_(1)
    assert arguments.damage() is None, "what may be written may be written"
    x[7, 2] += 1
    assert "input x was changed: 1 elements, the first at [7, 2]" in arguments.damage()
    arguments.reset(1)
    assert arguments.damage() is None
    guarded = arguments.guarded["y"]
    guarded.buffer[(guarded.buffer.numel() + y.nbytes) // 2 + 9] = 0
    assert "write outside y: 1 bytes written past its end, the nearest 10 bytes away" in arguments.damage()


def test_a_workspace_comes_last_is_poisoned_again_and_guarded():
    base = spec_of()
    (plain,) = base.implementations
    spec = dataclasses.replace(
        base, implementations=(dataclasses.replace(plain, workspace=lambda v, arch: 3 * v.n * v.t),)
    )
    problem = spec.problem({})
    (variant,) = expand(spec, ARCHES["sm_90a"], problem).variants
    inputs = draw(spec, problem, 0, HOST)
    arguments, other = (Arguments(spec, problem, inputs, HOST, variant=variant) for _ in range(2))
    without = Arguments(spec, problem, inputs, HOST)
    scratch = arguments.call[-1]
    assert len(arguments.call) == len(without.call) + 1 and set(arguments.outputs()) == {"acc", "y"}
    assert (scratch.shape, scratch.dtype) == ((900,), torch.float32) and scratch.data_ptr() % 64 == 0
    assert scratch.data_ptr() != other.call[-1].data_ptr(), "a buffer of its own for each set of arguments"
    assert arguments.nbytes == without.nbytes + scratch.nbytes
    for launch in (1, 2):
        scratch.fill_(1.0)
        arguments.restore_in_place()
        assert arguments.damage() is None and (scratch == 1).all()
        arguments.reset(launch)
        assert scratch.isnan().all() and not (bits(scratch) == poison(torch.float32, launch)).any()
    torch.as_strided(scratch, (901,), (1,))[900] = 0.0
    assert "write outside workspace: 4 bytes written past its end" in arguments.damage()
    (plain_scratch,) = scratch_of(spec, variant, problem, HOST)
    assert (plain_scratch.shape, plain_scratch.dtype) == (scratch.shape, scratch.dtype)
    assert scratch_of(base, variant, problem, HOST) == ()


def test_in_place_arguments_are_restored():
    spec = spec_of()
    problem = spec.problem({})
    inputs = draw(spec, problem, 0, HOST)
    arguments = Arguments(spec, problem, inputs, HOST, guard=256)
    acc, y = arguments.call[2], arguments.call[4]
    acc.fill_(5)
    y.fill_(5)
    arguments.restore_in_place()
    assert torch.equal(acc, inputs["acc"])
    assert (y == 5).all()


def test_a_specs_own_inputs_take_the_place_of_random_ones():
    spec = spec_of(lambda p, generator, device: {"acc": torch.full((p.n,), 3.0, dtype=torch.bfloat16, device=device)})
    problem = spec.problem({})
    drawn = draw(spec, problem, 0, HOST)
    assert (drawn["acc"] == 3).all()
    assert drawn["x"].float().std() > 0.5


def test_the_oracle_gets_what_the_kernel_gets_and_is_asked_once():
    seen = []

    def reference(problem, inputs):
        seen.append(inputs)
        return {"acc": inputs["acc"].double().add_(inputs["count"]), "y": inputs["x"].double() * inputs["scale"]}

    spec = dataclasses.replace(spec_of(), reference=reference)
    problem = spec.problem({"dtype": "float32"})
    oracle, inputs = Oracle(Device(None)), draw(spec, problem, 0, HOST)
    arguments = Arguments(spec, problem, inputs, HOST)
    wanted = oracle.outputs("here", spec, Case(problem, 0), inputs)
    assert set(seen[0]) == {"x", "acc", "scale", "count"}
    assert seen[0]["scale"] == arguments.call[1]
    assert set(wanted.outputs) == {"acc", "y"} and wanted.rounded == {}
    assert oracle.outputs("here", spec, Case(problem, 0), inputs) is wanted
    oracle.outputs("here", spec, Case(problem, 1), draw(spec, problem, 1, HOST))
    assert len(seen) == 2
    assert torch.equal(inputs["acc"], draw(spec, problem, 0, HOST)["acc"]), "a reference writes to copies only"
