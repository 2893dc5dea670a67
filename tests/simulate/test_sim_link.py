"""Calls resolved into copies of the functions' bodies."""

from __future__ import annotations

from tunekit.simulate.ptx.link import linked
from tunekit.simulate.ptx.module import Address, Guard, Immediate, Kernel, Label, Register, Symbol
from tunekit.simulate.ptx.read import read_module

HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n"
ADD = """.func (.param .b32 sum) add(.param .b32 a, .param .b32 b) {
    .reg .b32 %r<4>; .reg .pred %p1;
    ld.param.b32 %r1, [a];
    ld.param.b32 %r2, [b];
    setp.eq.s32 %p1, %r1, 0;
    @%p1 bra SKIP;
    add.s32 %r2, %r1, %r2;
SKIP:
    st.param.b32 [sum], %r2;
    ret;
}
"""
CALL = """{ .param .b32 param0; .param .b32 param1; .param .b32 retval0;
    st.param.b32 [param0], %r1; st.param.b32 [param1+0], 7;
    @%p1 call.uni (retval0), add, (param0, param1);
    ld.param.b32 %r1, [retval0]; }
"""


def link(functions: str, body: str) -> Kernel:
    text = f"{HEAD}{functions}.visible .entry k(.param .u64 k_param_0) {{ .reg .b32 %r<9>; .reg .pred %p<3>; {body} }}"
    module = read_module(text)
    return linked(module, module.kernels["k"])


def test_a_call_becomes_a_copy_with_its_own_names():
    kernel = link(ADD, "ld.param.b64 %r2, [k_param_0];" + CALL + CALL + "ret;")
    texts = [i.dotted for i in kernel.instructions]
    once = (
        ["st.local.b32"] * 2 + ["bra"] + ["ld.local.b32"] * 2 + ["setp.eq.s32", "bra", "add.s32", "st.local.b32", "bra"]
    )
    assert texts == ["ld.param.b64", *[*once, "ld.local.b32"] * 2, "ret"]
    assert [i.index for i in kernel.instructions] == list(range(len(texts)))
    skip = kernel.instructions[3]  # the guarded call: those not in it go on behind the copy
    assert skip.guard == Guard(Register("%p1"), negated=True)
    assert kernel.labels[skip.operands[0].name] == 11
    assert kernel.instructions[4].operands == (Register("%r1@add.1"), Address(Symbol("param0@1")))
    assert kernel.instructions[9].operands[0] == Address(Symbol("retval0@1"))
    assert kernel.instructions[7].operands == (Label("SKIP@add.1"),)
    assert kernel.labels["SKIP@add.1"] == 9 and kernel.labels["SKIP@add.2"] == 20
    assert {v.name: v.space for v in kernel.variables}["retval0@2"] == "local"
    assert kernel.registers["%r1@add.2"] == 32 and kernel.registers["%r1"] == 32
    assert kernel.instructions[8].line > 0 and kernel.instructions[8].text == "add.s32 %r2, %r1, %r2"


def test_parameters_in_registers_are_moved():
    function = ".func (.reg .b32 x) twice(.reg .b32 y, .reg .pred q) { @q add.s32 x, y, y; ret; }"
    kernel = link(function, "call (%r1), twice, (5, %p1); ret;")
    got = [(i.dotted, i.operands) for i in kernel.instructions]
    x, y, q = (Register(f"{n}@twice.1") for n in "xyq")
    assert got == [
        ("mov.b32", (y, Immediate(5))),
        ("mov.pred", (q, Register("%p1"))),
        ("add.s32", (x, y, y)),
        ("bra", (Label("(behind)@twice.1"),)),
        ("mov.b32", (Register("%r1"), x)),
        ("ret", ()),
    ]


def test_a_function_in_a_function_and_its_shared_variable():
    functions = (
        ".func leaf() { .shared .b32 s[4]; .local .b32 l; .reg .b32 %r1; ld.shared.b32 %r1, [s+4];"
        " ld.local.b32 %r1, [l]; ret; } .func middle() { call leaf; call leaf; ret; }"
    )
    kernel = link(functions, "call middle; call leaf; ret;")
    shared = [i.operands[1] for i in kernel.instructions if i.dotted == "ld.shared.b32"]
    assert shared == [Address(Symbol("s@leaf"), 4)] * 3
    assert [v.name for v in kernel.variables if v.space == "shared"] == ["s@leaf"]
    assert len({i.operands[1] for i in kernel.instructions if i.dotted == "ld.local.b32"}) == 3


def test_what_stays_a_call():
    functions = (
        ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);.func endless() { call endless; ret; }"
    )
    body = (
        "{ .param .b64 a; .param .b64 b; .param .b32 r; call (r), vprintf, (a, b); } call endless; call %rd1, p; ret;"
    )
    kernel = link(functions, ".reg .b64 %rd1; p: .callprototype _ ();" + body)
    assert [i.text for i in kernel.instructions if i.opcode == "call"] == [
        "call (r), vprintf, (a, b)", "call endless", "call %rd1, p",
    ]  # fmt: skip


def test_a_body_that_runs_out_ends_in_a_ret():
    kernel = link("", "@%p1 bra OUT; add.s32 %r1, %r1, 1; OUT:")
    assert [i.dotted for i in kernel.instructions] == ["bra", "add.s32", "ret"]
    assert kernel.labels["OUT"] == 2
