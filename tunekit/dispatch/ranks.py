"""The ranks of a job: what this one is called, and how all of them come to one choice.

Each rank posts on a board what it could serve, and reads what the others posted; all come to the same list. Then
each loads the first of it and posts whether that went well, until there is one that every rank has loaded. What is
posted stays, so that a rank that asks again reads the same answer. The board is the store by which the processes of
torch.distributed found each other, or a directory beside the artifacts: no collective, so that several threads of a
rank may ask at once, and nothing runs on a GPU.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tunekit.dispatch.forked import Guard
from tunekit.errors import NoKernelError, UserError
from tunekit.store import files
from tunekit.store.artifacts import ArtifactStore

logger = logging.getLogger("tunekit")

SAY_S = 2.0
WAIT_S = 60.0
STEP_S, LONGEST_STEP_S = 0.002, 0.1
"""Between looks at the board, which grow rarer."""
MOST_OFFERED = 64
"""Candidates that a rank offers for a problem, best first."""
OLD_S = 7 * 86400.0
"""Boards of jobs that posted nothing for this long are removed."""
JOB = "TUNEKIT_JOB"
ATTEMPT = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")


class Board(Protocol):
    """Where ranks leave words for each other; a name is written once."""

    def post(self, name: str, words: str) -> None: ...

    def read(self, name: str) -> str | None: ...


class StoreBoard:
    """The key-value store of torch.distributed's default group."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def post(self, name: str, words: str) -> None:
        self._store.set(f"tunekit/{name}", words)

    def read(self, name: str) -> str | None:
        key = f"tunekit/{name}"
        return self._store.get(key).decode() if self._store.check([key]) else None


class FileBoard:
    """A directory of the artifact store, for one job."""

    def __init__(self, store: ArtifactStore, job: str) -> None:
        unwritable = store.unwritable()
        if unwritable:
            raise UserError(
                f"all_or_nothing=True keeps what the ranks choose in {store.root / 'ranks'}: {unwritable}; "
                "initialise torch.distributed before load(), or give a store that can be written"
            )
        self._directory = store.root / "ranks" / hashlib.sha256(job.encode()).hexdigest()[:24]
        self._directory.mkdir(parents=True, exist_ok=True)
        _remove_old(self._directory)

    def post(self, name: str, words: str) -> None:
        files.publish(words.encode(), self._directory / name, self._directory)

    def read(self, name: str) -> str | None:
        try:
            return (self._directory / name).read_text()
        except FileNotFoundError:
            return None


def _remove_old(ours: Path) -> None:
    for directory in ours.parent.iterdir():
        try:
            if directory != ours and time.time() - directory.stat().st_mtime > OLD_S:
                shutil.rmtree(directory, ignore_errors=True)
        except OSError:
            continue


@dataclass(frozen=True)
class Ranks:
    """This process as one of `count` ranks. `series` tells apart the kernels that a process loads of one spec."""

    rank: int
    count: int
    board: Board
    series: str
    wait_s: float

    def agree(self, subject: str, refreshes: int, offers: Sequence[str], load: Callable[[str], str]) -> str | None:
        """The first of the offers that every rank makes and has loaded; None where there is none.

        `load` loads one and says what went wrong, if anything. After each refresh a subject is a new one.

        Raises:
            NoKernelError: a rank did not come within `wait_s`.
        """
        name = hashlib.sha256(f"{self.series}/{refreshes}/{subject}".encode()).hexdigest()[:32]
        everybody = self._exchange(f"{name}.offers", json.dumps(list(offers)[:MOST_OFFERED]), subject)
        lists = [json.loads(words) for words in everybody]
        common = [offer for offer in lists[0] if all(offer in other for other in lists)]
        for turn, offer in enumerate(common):
            answers = self._exchange(f"{name}.{turn}", load(offer), subject)
            failed = {rank: why for rank, why in enumerate(answers) if why}
            if not failed:
                return str(offer)
            rank, why = next(iter(failed.items()))
            logger.warning("%s: no rank takes %s, because rank %d can't: %s", subject, offer, rank, why)
        return None

    def _exchange(self, name: str, words: str, subject: str) -> list[str]:
        """What every rank says under a name; this one says `words`, unless it has spoken."""
        if self.board.read(f"{name}.{self.rank}") is None:
            self.board.post(f"{name}.{self.rank}", words)
        said: dict[int, str] = {}
        began, told, step_s = time.monotonic(), False, STEP_S
        while len(said) < self.count:
            for rank in range(self.count):
                heard = self.board.read(f"{name}.{rank}") if rank not in said else None
                if heard is not None:
                    said[rank] = heard
            missing = ", ".join(str(rank) for rank in range(self.count) if rank not in said)
            waited = time.monotonic() - began
            if missing and waited > self.wait_s:
                raise NoKernelError(
                    f"rank {self.rank} waited {self.wait_s:g} s for rank(s) {missing} to choose for {subject}: with "
                    "all_or_nothing every rank must load, call and refresh alike"
                )
            if missing and waited > SAY_S and not told:
                told = True
                logger.warning(
                    "rank %d waits for rank(s) %s to choose for %s (at most %g s)",
                    self.rank,
                    missing,
                    subject,
                    self.wait_s,
                )
            if missing:
                time.sleep(step_s)
                step_s = min(LONGEST_STEP_S, 1.5 * step_s)
        return [said[rank] for rank in range(self.count)]


def distributed() -> Any:
    """torch.distributed, where it is initialised; else None. Imports nothing."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


def own_name() -> str:
    """This rank, or process, in words; read once, when a kernel is loaded."""
    group = distributed()
    rank = os.environ.get("RANK", "") if group is None else str(group.get_rank())
    local = os.environ.get("LOCAL_RANK", "")
    if not rank:
        return f"process {os.getpid()}"
    return f"rank {rank}" + (f" (local rank {local})" if local and local != rank else "")


def join(spec: str, store: ArtifactStore, wait_s: float = WAIT_S) -> Ranks:
    """This process's place among the ranks: by torch.distributed where initialised, else by RANK and WORLD_SIZE.

    Raises:
        UserError: neither tells how many ranks there are; or the store can't be written, where it must be.
    """
    group = distributed()
    if group is not None:
        rank, count = group.get_rank(), group.get_world_size()
        board: Board = StoreBoard(group.distributed_c10d._get_default_store())
    else:
        rank, count = _number("RANK"), _number("WORLD_SIZE")
        if not 0 <= rank < count:
            raise UserError(f"RANK={rank} is not below WORLD_SIZE={count}")
        board = FileBoard(store, _job())
    with _loads_guard:
        _loads[spec] += 1
        series = f"{spec}/{_loads[spec]}"
    return Ranks(rank, count, board, series, wait_s)


_loads: Counter[str] = Counter()
_loads_guard = Guard()


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise UserError(
            "all_or_nothing=True must know the ranks: initialise torch.distributed before load(), or set RANK and "
            f"WORLD_SIZE as torchrun does ({name} is {text!r})"
        )
    return int(text)


def _job() -> str:
    """What the ranks of a job have in common and no other job has.

    TUNEKIT_JOB; else the process that started them, and what tells two of its jobs apart.
    """
    named = os.environ.get(JOB)
    if named:
        return named
    parent = "/".join([str(os.getppid()), *(os.environ.get(name, "") for name in ATTEMPT)])
    try:
        stat = Path(f"/proc/{os.getppid()}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return parent
    return f"{boot}/{parent}/{stat.rpartition(')')[2].split()[19]}"
