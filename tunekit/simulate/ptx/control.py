"""Where the lanes of a warp meet again after they parted: basic blocks and immediate post-dominators.

PTX says which instructions may be executed by lanes that have diverged, not where the lanes meet. As in
hardware with a reconvergence stack, that is the first instruction that every way from the branch to the end of the
kernel passes. Ways that end on their own (an early exit, a failed assertion's trap) would leave no such
instruction for the rest; so where there is none, one way to end is looked at after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tunekit.simulate.ptx.module import Instruction, Kernel, Label, Vector

_END = -1
_LEAVING = frozenset({"ret", "exit", "trap"})


@dataclass(frozen=True, slots=True)
class Block:
    """Instructions first..last, entered at the first only and left at the last only.

    successors: places of the next blocks in the list of blocks. ends: None, or how the kernel may end here
    ("trap", "exit", "ret"; a body that runs out is "ret").
    """

    first: int
    last: int
    successors: tuple[int, ...]
    ends: str | None


def targets(instruction: Instruction) -> tuple[str, ...]:
    """The labels that a branch names."""
    found: list[str] = []
    if instruction.opcode in ("bra", "brx"):
        for operand in instruction.operands:
            items = operand.items if isinstance(operand, Vector) else (operand,)
            found += [item.name for item in items if isinstance(item, Label)]
    return tuple(found)


def basic_blocks(kernel: Kernel) -> tuple[Block, ...]:
    """The kernel's blocks in the order of the text; the first is the entry."""
    instructions = kernel.instructions
    count = len(instructions)
    leaders = {0} if count else set()
    for instruction in instructions:
        if instruction.opcode in _LEAVING or instruction.opcode in ("bra", "brx"):
            leaders.add(instruction.index + 1)
            leaders |= {kernel.labels[name] for name in targets(instruction)}
    firsts = sorted(leader for leader in leaders if leader < count)
    place = {first: n for n, first in enumerate(firsts)}
    blocks = []
    for n, first in enumerate(firsts):
        last = (firsts[n + 1] if n + 1 < len(firsts) else count) - 1
        blocks.append(_block(kernel, first, last, place))
    return tuple(blocks)


def _block(kernel: Kernel, first: int, last: int, place: dict[int, int]) -> Block:
    instruction = kernel.instructions[last]
    following: list[int] = []
    ends = None
    if instruction.opcode in _LEAVING:
        ends = instruction.opcode
    elif instruction.opcode in ("bra", "brx"):
        following = [kernel.labels[name] for name in targets(instruction)]
    goes_on = instruction.guard is not None or not (following or ends)
    if goes_on:
        following.append(last + 1)
    if any(index not in place for index in following):
        ends = "ret"
    successors = tuple(dict.fromkeys(place[index] for index in following if index in place))
    return Block(first, last, successors, ends)


def reconvergence(kernel: Kernel) -> list[int | None]:
    """For each instruction that can part lanes the index of the one at which they meet; else, or without one, None.

    Parting are a guarded bra, brx.idx, a guarded ret, exit or trap, and a guarded call (met right behind it).
    """
    found: list[int | None] = [None] * len(kernel.instructions)
    blocks = basic_blocks(kernel)
    meetings = meeting_blocks([block.successors for block in blocks], [block.ends for block in blocks])
    for block, meeting in zip(blocks, meetings, strict=True):
        instruction = kernel.instructions[block.last]
        parting = instruction.guard is not None or instruction.opcode == "brx"
        if parting and instruction.opcode in _LEAVING | {"bra", "brx"} and meeting is not None:
            found[block.last] = blocks[meeting].first
    for instruction in kernel.instructions:
        if instruction.opcode == "call" and instruction.guard is not None:
            found[instruction.index] = instruction.index + 1
    return found


def meeting_blocks(successors: Sequence[Sequence[int]], ends: Sequence[str | None]) -> list[int | None]:
    """For each block the block at which all ways out of it meet, or None if there is none.

    Tried in turn, until there is one: the ways to any end but a trap; the ways to one single end that is no
    trap; the ways to one trap. Of several meeting points of the same kind, the one from which the others
    can be reached, else the first in the text.
    """
    count = len(successors)
    ways_out = [len(set(successors[n])) + (ends[n] is not None) for n in range(count)]
    regular = [n for n in range(count) if ends[n] not in (None, "trap")]
    traps = [n for n in range(count) if ends[n] == "trap"]
    found: list[int | None] = [None] * count
    for groups in ([regular], [[n] for n in regular], [[n] for n in traps]):
        candidates: list[list[int]] = [[] for _ in range(count)]
        for group in groups:
            above = post_dominators(successors, group)
            for n in range(count):
                meeting = above[n]
                if meeting is None or meeting == _END:
                    continue
                arriving = sum(above[s] is not None for s in set(successors[n])) + (n in group)
                if ways_out[n] == 1 or arriving > 1:
                    candidates[n].append(meeting)
        for n in range(count):
            if found[n] is None and candidates[n]:
                found[n] = _earliest(candidates[n], successors)
    return found


def _earliest(candidates: Sequence[int], successors: Sequence[Sequence[int]]) -> int:
    distinct = sorted(set(candidates))
    for one in distinct:
        reached = _reachable([one], successors)
        if all(other in reached for other in distinct):
            return one
    return distinct[0]


def _reachable(starts: Iterable[int], neighbours: Sequence[Sequence[int]]) -> set[int]:
    seen = set(starts)
    pending = list(seen)
    while pending:
        for node in neighbours[pending.pop()]:
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def post_dominators(successors: Sequence[Sequence[int]], ends: Sequence[int]) -> list[int | None]:
    """The immediate post-dominator of each block, seen from the blocks `ends` alone.

    -1 stands for the common end behind them. None: the block reaches none of them. Blocks that reach none are
    left out, so that a way into an endless loop or to another end does not count.

    Cooper, Harvey, Kennedy, "A Simple, Fast Dominance Algorithm" (2001), on the reversed graph.
    """
    count = len(successors)
    finish = count  # the virtual end's place
    before: list[list[int]] = [[] for _ in range(count + 1)]
    for node in range(count):
        for following in successors[node]:
            before[following].append(node)
    before[finish] = list(ends)
    after = [list(following) for following in successors]
    for node in ends:
        after[node].append(finish)
    order = _postorder(finish, before)
    rank = {node: n for n, node in enumerate(order)}
    above: dict[int, int] = {finish: finish}
    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == finish:
                continue
            best: int | None = None
            for following in after[node]:
                if following in above:
                    best = following if best is None else _common(best, following, above, rank)
            if best is not None and above.get(node) != best:
                above[node] = best
                changed = True
    found: list[int | None] = [None] * count
    for node in range(count):
        if node in above:
            found[node] = _END if above[node] == finish else above[node]
    return found


def _common(one: int, other: int, above: dict[int, int], rank: dict[int, int]) -> int:
    while one != other:
        while rank[one] < rank[other]:
            one = above[one]
        while rank[other] < rank[one]:
            other = above[other]
    return one


def _postorder(root: int, neighbours: Sequence[Sequence[int]]) -> list[int]:
    order: list[int] = []
    seen = {root}
    stack = [(root, iter(neighbours[root]))]
    while stack:
        node, rest = stack[-1]
        for following in rest:
            if following not in seen:
                seen.add(following)
                stack.append((following, iter(neighbours[following])))
                break
        else:
            order.append(node)
            stack.pop()
    return order
