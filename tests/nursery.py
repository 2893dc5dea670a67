"""Processes that tests need by the dozen, forked from a warm one: a new interpreter that imports torch takes seconds.

A child runs the module that a new interpreter would have run, in a session of its own, with the environment, directory
and descriptors that were asked for. What it can't show: an import that the module forgets, what an interpreter reads of
its environment when it starts, and how it ends (it exits at once, and the nursery reaps it). How tunekit starts these
processes itself is tested in tests/jobs, and where a test asks for `new_interpreter`; `pytest --unspared` does without
nurseries in all tests. Nothing falls back: a test whose nursery does not answer fails.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import pytest

MESSAGE_BYTES = 2**18
START_LIMIT_S = 120.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
STATUS = struct.Struct("i")


class Nursery:
    """A warm process of a kind: for "measure" or "simulate", or a compile server of "host" or "cutedsl"."""

    def __init__(self, kind: str, compiled_c: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._kind, self._socket = kind, ours
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), kind, str(theirs.fileno()), str(compiled_c)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""},
            )

    def fork(self, request: Mapping[str, Any], fds: Sequence[int]) -> tuple[int, int]:
        """A child that does what `request` says with these descriptors: its pid, and where its end will be told."""
        mine, its = os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [its, *fds])
        finally:
            os.close(its)
        answered = select.select([mine], [], [], START_LIMIT_S)[0] and os.read(mine, STATUS.size)
        if not answered:
            os.close(mine)
            raise RuntimeError(f"the nursery for {self._kind} does not answer; its words are on stderr")
        return STATUS.unpack(answered)[0], mine

    def close(self) -> None:
        self._socket.close()
        self._process.wait(START_LIMIT_S)


class Popen:
    """As much of subprocess.Popen as tunekit asks of a process that runs one of its modules."""

    def __init__(
        self,
        nursery: Nursery,
        command: Sequence[str],
        *,
        stdin: int,
        stdout: Any,
        stderr: Any,
        pass_fds: Sequence[int],
        start_new_session: bool,
        env: Mapping[str, str],
    ) -> None:
        if not start_new_session or command[1] != "-c":
            raise NotImplementedError(f"not a module's process: {command}")
        path, module, *arguments = command[3:]
        theirs, ours = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        self.stdin = None if ours is None else os.fdopen(ours, "wb")
        request = {
            "path": path.split(os.pathsep),
            "module": module,
            "arguments": arguments,
            "cwd": os.getcwd(),
            "env": dict(env),
            "passed": list(pass_fds),
        }
        try:
            self.pid, self._status = nursery.fork(request, [theirs, stdout.fileno(), stderr.fileno(), *pass_fds])
        finally:
            os.close(theirs)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired("a child of the nursery", timeout or 0)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            told = os.read(self._status, STATUS.size)
            os.close(self._status)
            # None is told where the nursery itself is gone.
            self.returncode = os.waitstatus_to_exitcode(STATUS.unpack(told)[0]) if told else -signal.SIGKILL
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __del__(self) -> None:
        if self.__dict__.get("returncode", 0) is None:
            os.close(self._status)


def install(monkeypatch: pytest.MonkeyPatch, nurseries: Callable[[str], Nursery]) -> None:
    """Have the measuring and simulating processes and compile servers of this process forked from warm ones."""
    import tunekit.child
    import tunekit.jobs.pool as pool

    kind = "host"  # of the next compile server: `__init__` is told, its command says nothing of it
    begin = pool._Zygote.__init__

    def begun(zygote: Any, warm: tuple[str, ...], workers: int) -> None:
        nonlocal kind
        kind = "cutedsl" if "cutedsl" in warm else "host"
        begin(zygote, warm, workers)

    def server(command: list[str], **options: Any) -> Popen:
        return Popen(nurseries(kind), command, **options)

    def device(command: list[str], **options: Any) -> Popen:
        return Popen(nurseries("simulate" if "tunekit.simulate.worker" in command else "measure"), command, **options)

    monkeypatch.setattr(pool._Zygote, "__init__", begun)
    for module, popen in ((pool, server), (tunekit.child, device)):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": popen}))


# --- the warm process -------------------------------------------------------------------


def warm(kind: str, compiled_c: Path) -> None:
    """Import and initialise what each child of the kind needs first; start no thread."""
    if kind in ("measure", "simulate"):
        import torch

        torch.set_num_threads(1)
        torch.randn(8, 8).double().sum()
        if kind == "measure":
            from tunekit.measure.worker import settle_native_errors

            settle_native_errors()
        else:  # without tvm_ffi's runtime, which a simulating process stands in for
            from tunekit.simulate import problem, worker  # noqa: F401
        return
    from c_cache import Cache

    from tunekit.backends import backend, entry, host  # noqa: F401
    from tunekit.jobs import zygote  # noqa: F401

    host.compile_c = Cache(compiled_c)
    backend(kind).warm()


def serve(nursery: socket.socket) -> None:
    """Fork a child for each message, and tell each one's end, until the tests' end of the socket closes."""
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the tests' to handle
    statuses: dict[int, int] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(nursery, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not nursery:
                    os.read(ended, 4096)
                    _reap(statuses)
                    continue
                message, fds, _, _ = socket.recv_fds(nursery, MESSAGE_BYTES, 16)
                if not message:
                    return
                pid = os.fork()
                if pid == 0:
                    nursery.close()
                    for status in (*statuses.values(), ended, wakeup, fds[0]):
                        os.close(status)
                    selector.close()
                    _become(json.loads(message), fds[1:])
                for fd in fds[1:]:
                    os.close(fd)
                statuses[pid] = fds[0]
                _tell(fds[0], pid)


def _reap(statuses: dict[int, int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        handle = statuses.pop(pid, None)
        if handle is not None:
            _tell(handle, status)
            os.close(handle)


def _tell(handle: int, number: int) -> None:
    try:
        os.write(handle, STATUS.pack(number))
    except BrokenPipeError:
        return  # nobody waits for it


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> NoReturn:
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        for fd, standard in zip(fds, range(3), strict=False):
            os.dup2(fd, standard)
            os.close(fd)
        renamed = dict(zip(map(str, request["passed"]), map(str, fds[3:]), strict=True))
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:] = request["path"]
        sys.argv[:] = [request["module"], *(renamed.get(word, word) for word in request["arguments"])]
        importlib.invalidate_caches()
        importlib.import_module(request["module"]).main()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    socket_ = socket.socket(fileno=int(sys.argv[2]))
    warm(sys.argv[1], Path(sys.argv[3]))
    serve(socket_)
    os._exit(0)  # unloading what is warm takes seconds
