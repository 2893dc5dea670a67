"""How good the simulator's checks are: the attention kernel with one piece of synchronisation taken away at a time.

    python benchmarks/simulator_mutations.py [--arch sm_100a] [--seeds 6] [--strict] [--jobs 2] [--json FILE]

Mutated, in the compiled PTX, one at a time: every bar/barrier, fence, mbarrier arrival, tcgen05.fence/wait/commit,
wgmma.fence/commit/wait and bulk-group commit/wait is removed; every arrival that expects bytes arrives without
expecting them; every mbarrier.try_wait says at once that the phase is over ("removed"), or is executed and its answer
taken for yes whatever it is ("ignored"). One CTA runs, five KV tiles long, so that every ring of buffers wraps twice;
after the first seed that shows a finding or a wrong result no other is tried. Prints what found each mutation, and at
the end those that nothing found; docs/simulator.md says why each of these is none.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tunekit.model import Variant

PROBLEM = {"batch": 1, "t": 70, "s_k": 600, "heads": 2, "kv_heads": 1, "head_dim": 64}
SYMBOL = "mutated"
TIME_LIMIT_S = 60.0
REMOVED = (
    r"bar(rier)?\.(?!cluster\.(?:sync)?map)[a-z:.]+",
    r"fence\.[a-z_:.]+",
    r"membar\.[a-z.]+",
    r"mbarrier\.arrive[a-z_:.0-9]*",
    r"mbarrier\.expect_tx[a-z_:.0-9]*",
    r"tcgen05\.(fence|wait|commit)[a-z0-9_:.]+",
    r"wgmma\.(fence|commit_group|wait_group)[a-z.]+",
    r"cp\.async\.bulk\.(commit_group|wait_group)[a-z.]*",
)
_STATEMENT = re.compile(rf"^(\s*(?:@!?%\w+\s+)?)({'|'.join(REMOVED)})(\s[^;]*)?;")
_WAIT = re.compile(r"^(\s*)(mbarrier\.(?:try|test)_wait[a-z:.0-9]*)\s+(%?\w+),[^;]*;")
TRUE = "setp.eq.b32 {0}, 0, 0;"


@dataclass(frozen=True)
class Mutation:
    """Line `line` (from 1) of the PTX becomes `text`; `number` counts those of one instruction and one `how`."""

    line: int
    instruction: str
    how: str
    number: int
    was: str
    text: str

    def of(self, ptx: str) -> str:
        lines = ptx.split("\n")
        lines[self.line - 1] = self.text
        return "\n".join(lines)


@dataclass(frozen=True)
class Result:
    mutation: Mutation
    by: str
    seed: int | None
    seconds: float


def mutations(ptx: str) -> Iterator[Mutation]:
    seen: Counter[tuple[str, str]] = Counter()

    def one(line: int, instruction: str, how: str, was: str, text: str) -> Mutation:
        seen[instruction, how] += 1
        return Mutation(line, instruction, how, seen[instruction, how], was.strip(), text)

    for line, was in enumerate(ptx.split("\n"), 1):
        if wait := _WAIT.match(was):
            answer = TRUE.format(wait[3])
            yield one(line, wait[2], "removed", was, f"{wait[1]}{answer}")
            yield one(line, wait[2], "ignored", was, f"{was} {answer}")
        elif plain := _STATEMENT.match(was):
            name = plain[2]
            yield one(line, name, "removed", was, f"// {was.strip()}")
            if ".expect_tx" in name and "arrive" in name:
                bare = was.replace(".expect_tx", "")
                yield one(line, name, "expects nothing", was, re.sub(r",\s*[^,\]]+;", ";", bare))


class Kernel:
    """The compiled kernel with its launch, its buffers, and what it should compute.

    Compiled into `place`, unless it is there. Buffers are shared with forked processes: each has a kernel of its own.
    """

    def __init__(self, arch: str, place: Path) -> None:
        from tunekit.arch import parse_arch
        from tunekit.simulate.launch.arguments import arguments_of
        from tunekit.simulate.launch.capture import capture_object
        from tunekit.simulate.problem import oracle
        from tunekit.simulate.ptx.read import read_module
        from tunekit.space import default_variant
        from tunekit.spec import load_spec

        self.spec = load_spec("fmha")
        self.problem = self.spec.problem(PROBLEM)
        variant = default_variant(self.spec, parse_arch(arch), self.problem)
        if variant is None:
            raise SystemExit(f"fmha has no default variant on {arch}")
        if not (place / "kernel.ptx").exists():
            place.mkdir(parents=True, exist_ok=True)
            self._compile(variant, place)
        self.ptx = (place / "kernel.ptx").read_text()
        self.arguments = arguments_of(self.spec, self.problem, 0, variant)
        self.wanted = oracle("fmha", self.problem, 0)
        module = read_module(self.ptx)
        self.launches = capture_object(place / "kernel.o", SYMBOL, self.arguments.call, parse_arch(arch), module)

    def _compile(self, variant: Variant, place: Path) -> None:
        from tunekit.backends.contract import CompileRequest
        from tunekit.jobs import Limits, Pool, Task

        static, arch = self.spec.static(self.problem), variant.arch
        request = CompileRequest("fmha", variant.implementation, arch, static, variant.tunables, SYMBOL, str(place))
        with Pool(workers=1, warm=("cutedsl",), limits=Limits(60, 300, 8 * 2**30)) as pool:
            (made,) = pool.run([Task(id="fmha", payload=request.to_payload())])
        if made.status != "ok":
            raise SystemExit(f"compiling for {variant.arch}: {made.reason}")

    def run(self, ptx: str, seed: int, strict: bool) -> str:
        """What is found of the kernel with this PTX under one seed; "" for nothing."""
        from tunekit.oracle.judge import judge
        from tunekit.simulate.problem import unwritten, written_elements
        from tunekit.simulate.ptx.read import read_module
        from tunekit.simulate.run import simulate

        def look(_: int) -> str:
            outputs = self.arguments.outputs()
            masks = {name: written_elements(self.arguments, name) for name in outputs}
            return judge(self.spec, self.problem, outputs, self.wanted, unwritten, written=masks) or ""

        report = simulate(
            self.launches, read_module(ptx), self.arguments.buffers, seed=seed, ctas=(0,), jobs=1,
            time_limit_s=TIME_LIMIT_S, strict=strict, judge=look,
        )  # fmt: skip
        if report.refusal is not None:
            return f"not modelled: {report.refusal}"
        kinds = dict.fromkeys(fault.kind.value for fault in report.faults)
        (schedule,) = report.schedules
        if schedule.state == "time limit":
            kinds["time limit"] = None
        if schedule.wrong and not kinds:
            kinds[f"wrong result: {schedule.wrong.splitlines()[0]}"] = None
        return ", ".join(kinds)


_kernel: Kernel
_seeds: range
_strict: bool


def _start(arch: str, place: Path, seeds: int, strict: bool) -> None:
    """A worker's own kernel."""
    global _kernel, _seeds, _strict
    _kernel, _seeds, _strict = Kernel(arch, place), range(seeds), strict


def _try(mutation: Mutation) -> Result:
    begin = time.perf_counter()
    for seed in _seeds:
        by = _kernel.run(mutation.of(_kernel.ptx), seed, _strict)
        if by:
            return Result(mutation, by, seed, time.perf_counter() - begin)
    return Result(mutation, "", None, time.perf_counter() - begin)


def chosen(every: list[Mutation], sample: int | None, only: str | None) -> list[Mutation]:
    """All, or `sample` of them spread evenly; `only`: a pattern that the instruction, the how or the line match."""
    if only:
        every = [m for m in every if re.search(only, f"{m.line}: {m.instruction} {m.how} {m.number} {m.was}")]
    if sample is not None and sample < len(every):
        every = [every[place * len(every) // sample] for place in range(sample)]
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="sm_100a")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only", help="a regular expression: line, instruction, how, number, text")
    parser.add_argument("--keep", type=Path, help="compile into this folder, or take what is there")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = (arguments.keep or Path(temporary)) / arguments.arch
        whole = Kernel(arguments.arch, place)
        for seed in range(arguments.seeds):
            if by := whole.run(whole.ptx, seed, arguments.strict):
                raise SystemExit(f"{arguments.arch}: the kernel itself, under seed {seed}: {by}")
        todo = chosen(list(mutations(whole.ptx)), arguments.sample, arguments.only)
        results: list[Result] = []
        own = (arguments.arch, place, arguments.seeds, arguments.strict)
        with multiprocessing.get_context("fork").Pool(arguments.jobs, _start, own) as pool:
            for result in pool.imap_unordered(_try, todo):
                results.append(result)
                print(_line(result), flush=True)
    _table(arguments, results)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def _line(result: Result) -> str:
    m = result.mutation
    found = f"{result.by} (seed {result.seed})" if result.by else "NOT FOUND"
    return f"{m.line:5} {m.was.split(';')[0]} [{m.how}]: {found}"


def _table(arguments: Any, results: list[Result]) -> None:
    word = ", strict" if arguments.strict else ""
    print(f"\n{arguments.arch}{word}: what was mutated, how many, how many found, by what first")
    kinds = dict.fromkeys(
        (r.mutation.instruction, r.mutation.how) for r in sorted(results, key=lambda r: r.mutation.line)
    )
    for instruction, how in kinds:
        mine = [r for r in results if (r.mutation.instruction, r.mutation.how) == (instruction, how)]
        by = Counter(r.by.split(",")[0].split(":")[0] for r in mine if r.by)
        words = ", ".join(f"{name} {count}" for name, count in by.most_common())
        print(f"{len(mine):4} {sum(by.values()):4}  {instruction} [{how}]: {words}")
    found = sum(bool(r.by) for r in results)
    print(f"{len(results):4} {found:4}  in all; {arguments.seeds} seeds at most")
    for result in sorted(results, key=lambda r: r.mutation.line):
        if not result.by:
            print(_line(result))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
