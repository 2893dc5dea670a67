"""The processes that the package starts find its modules, not those that lie in the working directory."""

from __future__ import annotations

import os
import subprocess

import pytest

from tunekit.jobs import Pool
from tunekit.launch import module_command
from tunekit.measure.process import Child

HIDING = ("json", "torch", "tempfile", "random")


@pytest.fixture
def crowded(tmp_path, monkeypatch):
    """A working directory with files named as modules that the children import."""
    for name in HIDING:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    monkeypatch.chdir(tmp_path)


def test_the_zygote_imports_past_the_working_directory(crowded):
    with Pool(workers=1, warm=()) as pool:
        assert pool.warm_up["threads"] == 1


def test_the_measuring_child_imports_past_the_working_directory(crowded):
    limits = {"prepare": 60.0, "check": 60.0, "run": 60.0}
    child = Child("host", 60.0, limits)
    try:
        child.start()
    finally:
        child.close()


def test_a_measuring_child_ends_with_its_parent_while_it_imports():
    """Case 4: importing torch takes seconds; a parent that dies meanwhile leaves nobody."""
    reply, child_reply = os.pipe()
    child_life, life = os.pipe()
    arguments = ["--device", "host", "--run-limit-s", "1", "--reply", str(child_reply), "--life", str(child_life)]
    process = subprocess.Popen(
        module_command("tunekit.measure.start", *arguments),
        stdin=subprocess.PIPE,
        pass_fds=(child_reply, child_life),
        start_new_session=True,
    )
    try:
        os.close(life)
        assert process.wait(1.0) == -9
    finally:
        process.kill()
        process.communicate()
        for fd in (reply, child_reply, child_life):
            os.close(fd)
