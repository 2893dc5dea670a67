"""Basic blocks and meeting points: by hand, and random graphs against the definition."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tunekit.simulate.ptx.control import basic_blocks, meeting_blocks, post_dominators, reconvergence
from tunekit.simulate.ptx.module import Kernel
from tunekit.simulate.ptx.read import read_module

END = -1


def kernel_of(body: str) -> Kernel:
    text = f".version 8.8 .target sm_90a .entry k() {{ .reg .pred %p<9>; .reg .b32 %r<9>; {body} }}"
    return read_module(text).kernels["k"]


def meetings(body: str) -> dict[str, str | None]:
    """For each parting instruction its text, to the text of the instruction at which lanes meet."""
    kernel = kernel_of(body)
    points = reconvergence(kernel)
    texts = [i.text for i in kernel.instructions] + ["the end"]
    parting = [i for i in kernel.instructions if i.guard is not None or i.opcode == "brx"]
    assert all(points[i.index] is None for i in kernel.instructions if i not in parting)
    return {i.text: None if points[i.index] is None else texts[points[i.index]] for i in parting}


def test_if_else_and_loop():
    body = """@%p1 bra ELSE; add.s32 %r1,%r1,1; bra.uni JOIN; ELSE: add.s32 %r1,%r1,2;
        JOIN: mov.b32 %r2, 0; LOOP: add.s32 %r2,%r2,1; @%p2 bra LOOP; mov.b32 %r3, 0; ret;"""
    assert meetings(body) == {"@%p1 bra ELSE": "mov.b32 %r2, 0", "@%p2 bra LOOP": "mov.b32 %r3, 0"}


def test_blocks():
    blocks = basic_blocks(kernel_of("@%p1 bra L; mov.b32 %r1, 0; L: @%p2 ret; mov.b32 %r2, 0;"))
    assert [(b.first, b.last, b.successors, b.ends) for b in blocks] == [
        (0, 0, (2, 1), None), (1, 1, (2,), None), (2, 2, (3,), "ret"), (3, 3, (), "ret"),
    ]  # fmt: skip


def test_a_trap_on_the_way_does_not_count():
    body = "@%p1 bra SKIP; setp.eq.s32 %p2,%r1,0; @%p2 bra BAD; add.s32 %r1,%r1,1; SKIP: mov.b32 %r3,0; ret; BAD: trap;"
    assert meetings(body) == {"@%p1 bra SKIP": "mov.b32 %r3,0", "@%p2 bra BAD": None}


def test_an_early_exit_does_not_count():
    """As in a warp-specialised kernel whose producer returns inside its branch."""
    body = """@%p1 bra CONSUMER; @%p2 bra SKIP; mov.b32 %r1,0; SKIP: mov.b32 %r2,0; exit;
        CONSUMER: @%p3 bra NEXT; @%p4 exit; mov.b32 %r3,0; NEXT: mov.b32 %r4,0; ret;"""
    assert meetings(body) == {
        "@%p1 bra CONSUMER": None,
        "@%p2 bra SKIP": "mov.b32 %r2,0",
        "@%p3 bra NEXT": "mov.b32 %r4,0",
        "@%p4 exit": None,
    }


def test_a_way_into_an_endless_loop_does_not_count():
    body = "@%p1 bra SKIP; @%p2 bra FOREVER; SKIP: mov.b32 %r1,0; ret; FOREVER: bra.uni FOREVER;"
    assert meetings(body) == {"@%p1 bra SKIP": "mov.b32 %r1,0", "@%p2 bra FOREVER": None}


def test_a_switch_meets_behind_its_cases():
    body = """T: .branchtargets A, B, C; brx.idx %r1, T; A: mov.b32 %r2,0; bra.uni D; B: mov.b32 %r2,1; bra.uni D;
        C: mov.b32 %r2,2; D: mov.b32 %r3,0; ret;"""
    (point,) = meetings(body).values()
    assert point == "mov.b32 %r3,0"


def test_a_branch_to_the_next_instruction_and_a_body_that_runs_out():
    assert meetings("@%p1 bra L; L: mov.b32 %r1,0;") == {"@%p1 bra L": "mov.b32 %r1,0"}
    assert meetings("@%p1 bra L; mov.b32 %r1,0; L:") == {"@%p1 bra L": None}


def test_inline_assembly_that_waits_meets_behind_its_loop():
    wait = "{ .reg .pred P1; W: mbarrier.try_wait.parity.shared.b64 P1,[%r1],%r2; @P1 bra.uni D; bra.uni W; D: }"
    assert meetings(wait + "mov.b32 %r1,0; ret;") == {"@P1 bra.uni D": "mov.b32 %r1,0"}


# -- random graphs against the definition -----------------------------------------------------------------------


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 9))
    nodes = st.integers(0, count - 1)
    successors = [tuple(draw(st.lists(nodes, max_size=3, unique=True))) for _ in range(count)]
    kinds = st.sampled_from(["ret", "exit", "trap"])
    ends = [draw(kinds) if not s or draw(st.integers(0, 5)) == 0 else None for s in successors]
    return successors, ends


def reaches(start: int, goals: Sequence[int], successors, without: int | None = None) -> bool:
    seen, pending = set(), [start]
    while pending:
        node = pending.pop()
        if node == without or node in seen:
            continue
        if node in goals:
            return True
        seen.add(node)
        pending += successors[node]
    return False


def nearest(node: int, goals: Sequence[int], successors) -> int | None:
    """By definition: of the blocks on every way to a goal, that which all others follow."""
    if not reaches(node, goals, successors):
        return None
    others = [n for n in range(len(successors)) if n != node and not reaches(node, goals, successors, without=n)]
    for one in others:
        if all(n == one or not reaches(one, goals, successors, without=n) for n in others):
            return one
    return END


@given(graphs())
@settings(max_examples=400, deadline=None)
def test_post_dominators_are_those_of_the_definition(graph):
    successors, ends = graph
    goals = [n for n, end in enumerate(ends) if end]
    assert post_dominators(successors, goals) == [nearest(n, goals, successors) for n in range(len(successors))]


@given(graphs())
@settings(max_examples=400, deadline=None)
def test_meeting_points(graph):
    """What a meeting point must be, whichever group of ends it was found with."""
    successors, ends = graph
    regular = [n for n, end in enumerate(ends) if end in ("ret", "exit")]
    for node, meeting in enumerate(meeting_blocks(successors, ends)):
        plain = nearest(node, regular, successors)
        several = len(successors[node]) + (ends[node] is not None) > 1
        met = [s for s in successors[node] if reaches(s, regular, successors)]
        if plain not in (None, END) and (len(met) + (node in regular) > 1 or not several):
            assert meeting == plain
        if meeting is not None and several:
            assert sum(reaches(s, [meeting], successors) for s in successors[node]) > 1
        if meeting is None and several:
            single = [n for n, end in enumerate(ends) if end]
            for goal in single:
                found = nearest(node, [goal], successors)
                arriving = sum(reaches(s, [goal], successors) for s in successors[node]) + (node == goal)
                assert found in (None, END) or arriving < 2
