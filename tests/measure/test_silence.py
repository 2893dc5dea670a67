"""Finals and compiles keep apart, in one process and across processes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

from tunekit.measure.silence import COMPILES, FINALS, Compiles, held, silence


def test_alone_nothing_waits(tmp_path):
    said = []
    with silence(tmp_path, on_wait=said.append) as beside:
        assert beside == "" and held(tmp_path / FINALS)
        with silence(tmp_path, on_wait=said.append) as other:
            assert other == "", "finals on two GPUs run side by side"
    with Compiles(tmp_path, said.append) as compiles, Compiles(tmp_path, said.append):
        compiles.give_way(lambda: said.append("paused"), lambda: said.append("resumed"))
        assert held(tmp_path / COMPILES)
    assert said == [] and not held(tmp_path / COMPILES) and not held(tmp_path / FINALS)


def test_another_processs_compiles_pause_for_a_final(tmp_path):
    """Case 40: across processes, compiling and a final don't overlap; the compiler is told and goes on after it."""
    script = textwrap.dedent(f"""
        import time
        from pathlib import Path
        from tunekit.measure.silence import Compiles
        say = lambda text: print(text, flush=True)
        with Compiles(Path({str(tmp_path)!r})) as compiles:
            say("compiling")
            paused = []
            while not paused:
                compiles.give_way(lambda: say("paused"), lambda: (paused.append(1), say("resumed")))
                time.sleep(0.02)
        """)
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "compiling\n"
        waits = []
        with silence(tmp_path, wait_s=10, on_wait=waits.append) as beside:
            assert beside == "" and len(waits) == 1
            assert other.stdout.readline() == "paused\n"
            time.sleep(0.3)
            assert other.poll() is None
        assert other.stdout.readline() == "resumed\n"
        assert other.wait(5) == 0


def test_a_compiler_that_does_not_give_way_is_in_the_record(tmp_path):
    with Compiles(tmp_path), silence(tmp_path, wait_s=0.2) as beside:
        assert "another process compiled on this machine" in beside and "0.2 s" in beside
    with silence(tmp_path / "absent") as beside:
        assert "unknown" in beside, "where no lock can be made, that is said"


def test_a_compile_does_not_begin_during_a_final(tmp_path):
    order = []

    def compile_something():
        with Compiles(tmp_path, lambda text: order.append("waits")):
            order.append("compiles")

    with silence(tmp_path):
        thread = threading.Thread(target=compile_something)
        thread.start()
        time.sleep(0.3)
        order.append("final ends")
    thread.join(5)
    assert order == ["waits", "final ends", "compiles"]
