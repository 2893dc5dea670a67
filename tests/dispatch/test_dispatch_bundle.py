"""Bundles: what they hold, and serving from one where there is nothing else."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tunekit
from tests.dispatch.test_dispatch_processes import NOBODY, ROOT, interpreter
from tunekit.backends import host
from tunekit.backends.load import RUNTIME_LIBRARY, runtime_library
from tunekit.dispatch import bundling
from tunekit.dispatch.bundled import open_library
from tunekit.dispatch.bundling import bundle
from tunekit.dispatch.devices import DeviceFacts
from tunekit.dispatch.hot_path import native_parts
from tunekit.dispatch.ladder import Candidate
from tunekit.environment import environment
from tunekit.errors import NoKernelError, UserError
from tunekit.identity import distribution_version
from tunekit.model import Level
from tunekit.settings import Settings
from tunekit.spec import TensorArg, load_spec
from tunekit.store import bundle_writer
from tunekit.store.bundle import newest, open_bundle

NOT_THERE = ("cutlass", "nvidia", "cuda", "sqlite_utils", "optuna", "rich", "click", "filelock", "psutil")
"""What no serving machine needs: packages by the beginning of their names."""

BARE = """
import json, sys

reads = []
outside = []

def watch(event, args):
    if event == "open":
        reads.append((str(args[0]), args[1]))
    elif event in ("sqlite3.connect", "socket.connect"):
        outside.append(event)

sys.addaudithook(watch)
import tunekit
kernel = tunekit.load(sys.argv[1], bundle=sys.argv[2])
import torch
x = torch.ones(int(sys.argv[3]), 64)
y = kernel(x)
written = [name for name, mode in reads if mode and set("wax+") & set(str(mode))]
print(json.dumps({
    "y": y[0, :2].tolist(), "stats": kernel.stats(), "level": kernel.choice(x).level, "written": written,
    "outside": outside, "databases": [name for name, _ in reads if "tunekit.db" in name or "tuning_db" in name],
}))
"""


@pytest.fixture
def make(tuned, tmp_path):
    """Make a bundle of what was tuned."""

    def run(out: str = "bundle", *problems: dict, **options) -> Path:
        made = tmp_path / out
        wanted = [tuned.spec.problem(problem) for problem in problems]
        bundle(tuned.spec, tuned.reference, "host", made, Settings(**tuned.places), wanted, **options)
        return made

    return run


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """The packages of a serving machine: all that are installed here but the compiler and the tuner's own."""
    site = tmp_path_factory.mktemp("bare")
    for path in Path(torch.__file__).parents[1].iterdir():
        if not path.name.startswith(NOT_THERE) and path.suffix != ".pth":
            (site / path.name).symlink_to(path)
    return site


def child(code: str, *arguments: object, site: Path, bound: bool = False, **environ: str):
    """Run `code` in a new process that has the packages in `site` only, no home, and a database that can't be one."""
    env = {"PATH": "/nowhere", "HOME": "/nowhere", "TUNEKIT_DB": "/dev/full", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"PYTHONPATH": f"{ROOT}:{site}", **environ}
    return interpreter("-S", "-c", code, *arguments, env=env, bound=bound)


def serve(tuned, directory: Path, *, site: Path, bound: bool = False) -> dict:
    """Serve 64 rows from a bundle: what came out."""
    done = child(BARE, tuned.reference, directory, 64, site=site, bound=bound)
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout.splitlines()[-1]), "stderr": done.stderr}


def aged(directory: Path) -> dict[Path, float]:
    """Make every file old, so that a use that is noted shows; the dates."""
    for path in [*directory.rglob("*"), directory]:
        os.utime(path, (1e9, 1e9))
    return dates(directory)


def dates(directory: Path) -> dict[Path, float]:
    return {path: path.stat().st_mtime for path in [*directory.rglob("*"), directory]}


def test_a_bundle_serves_where_there_is_nothing_else(tuned, make, bare):
    """No compiler, no database, no home: the winner, as measured here; no other place is read, nothing written."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    shutil.rmtree(tuned.root)
    before = aged(directory)
    done = serve(tuned, directory, site=bare)
    assert done["y"] == [0.5, 0.5 + 1 / 64]
    assert (done["stats"]["exact"], done["stats"]["loaded"], done["level"]) == (1, 1, "exact")
    assert dates(directory) == before
    assert done["databases"] == done["outside"] == done["written"] == [] and done["stderr"] == ""


def test_a_bundle_without_native_dispatch_serves_all_the_same(tuned, make, bare, monkeypatch, caplog):
    """Made where there is no C compiler: it says so, and its calls are dispatched in Python."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    with monkeypatch.context() as patched:
        patched.setattr(host, "COMPILERS", ())
        directory = make()
    assert "the bundle has no hot_path" in caplog.text and "no C compiler found" in caplog.text
    done = serve(tuned, directory, site=bare)
    assert done["y"] == [0.5, 0.5 + 1 / 64] and "dispatched in Python" in done["stderr"]


def test_a_bundle_serves_from_a_directory_that_cannot_be_written(tuned, make, bare):
    """Case 31: mode 0555, another owner, no home: it serves, and not even a date changes."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    for path in [*directory.rglob("*"), directory]:
        path.chmod(0o555 if path.is_dir() or path.suffix == ".so" else 0o444)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    before = aged(directory)
    done = serve(tuned, directory, site=bare, bound=True)
    assert done["level"] == "exact" and done["y"] == [0.5, 0.5 + 1 / 64]
    assert dates(directory) == before


def test_a_bundle_that_anybody_may_write_is_refused(tuned, make):
    """Case 32: what lies in a world-writable directory would run."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    for place in (directory, directory / "artifacts"):
        place.chmod(0o777)
        with pytest.raises(UserError, match=f"{place} is writable by everybody"):
            tunekit.load(tuned.reference, bundle=directory)
        place.chmod(0o755)
    tunekit.load(tuned.reference, bundle=directory)


def test_a_bundle_may_be_moved(tuned, make, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    moved = make().rename(tmp_path / "elsewhere")
    assert str(tmp_path) not in (moved / "bundle.json").read_text()
    kernel = tunekit.load(tuned.reference, bundle=moved)
    x = torch.randn(64, 64)
    wanted = tuned.spec.reference(tuned.spec.problem({"rows": 64}), {"x": x})
    torch.testing.assert_close(kernel(x).double(), wanted["y"], rtol=1e-5, atol=1e-5)


def test_a_relative_place_stays_the_same_after_chdir(tuned, make, tmp_path, monkeypatch):
    """Of a bundle, a store and a database, by argument and by the environment."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    monkeypatch.chdir(tuned.root)
    kernels = [
        tunekit.load(tuned.reference, bundle=Path(os.path.relpath(directory))),
        tunekit.load(tuned.reference, database=Path(tuned.database.name), artifacts=Path(tuned.artifacts.name)),
        tunekit.load(tuned.reference, database=tuned.database.name, artifacts=tuned.artifacts.name),
    ]
    monkeypatch.setenv("TUNEKIT_CACHE", ".")
    kernels.append(tunekit.load(tuned.reference))
    monkeypatch.chdir("/")
    for kernel in kernels:
        kernel(torch.ones(64, 64))
        assert kernel.stats()["exact"] == 1


def test_its_checksums_are_those_that_sha256sum_takes(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(command, cwd=directory, capture_output=True, text=True).stderr == ""
    listed = {line.split("  ", 1)[1] for line in (directory / "SHA256SUMS").read_text().splitlines()}
    there = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    assert there - listed == {"SHA256SUMS"} and listed <= there
    assert "LICENSES/tunekit.txt" in listed


def test_a_bundle_holds_the_file_that_is_loaded_and_no_other(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    compiled = tuned.compile(tuned.variant(unroll=2, delay_us=0), rows=8)
    assert sorted(path.suffix for path in tuned.artifacts.rglob("objects/*/*")) == 2 * [".so"] + 2 * [".source"]
    directory = make()
    (entry,) = json.loads((directory / "bundle.json").read_text())["entries"]
    kept = {path.name for path in (directory / "artifacts").rglob("*") if path.is_file()}
    assert {f"{entry['key']}.json", *(f"{part.key}.json" for part in native_parts()), Path(entry["file"]).name} < kept
    assert sorted(Path(name).suffix for name in kept) == 3 * [".json"] + 3 * [".so"]
    assert f"{compiled.key}.json" not in kept


@pytest.mark.parametrize("name", ["bundle.json", "winners.jsonl", "LICENSES/NOTICE.txt", "SHA256SUMS", ".so", ".json"])
@pytest.mark.parametrize("how", ["flip", "truncate", "remove"])
def test_a_damaged_bundle_is_refused(tuned, make, name, how):
    """Case 27, for bundles: any file, any damage: one sentence that names the file, and nothing is served."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    inside = [path for path in (directory / "artifacts").rglob(f"*{name}") if name.startswith(".")]
    path = inside[0] if inside else directory / name
    content = path.read_bytes()
    if how == "remove":
        path.unlink()
    else:
        path.write_bytes(content[: len(content) // 2] if how == "truncate" else bytes([content[0] ^ 4]) + content[1:])
    with pytest.raises(UserError) as caught:
        tunekit.load(tuned.reference, bundle=directory)
    words = str(caught.value)
    assert "\n" not in words and ("is damaged" in words or "is no bundle" in words)
    assert path.name in words or name == "SHA256SUMS"


def parts(plain: object, path: tuple = ()):
    """The places of all values in parsed JSON."""
    yield path
    pairs = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for name, value in pairs:
        yield from parts(value, (*path, name))


def test_an_index_with_anything_in_any_place_is_read_or_refused(tuned, make):
    """Whoever wrote it kept the checksums right, as another version would."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    index, sums = directory / "bundle.json", directory / "SHA256SUMS"
    text, listed = index.read_text(), sums.read_text()
    found = hashlib.sha256(index.read_bytes()).hexdigest()
    for path in parts(json.loads(text)):
        for wrong in (None, True, 1, 1.5, -1, 2**70, "", "x", [], {}, [1], {"a": 1}, [{}]):
            whole = {"": json.loads(text)}
            part: Any = whole
            *outer, last = ("", *path)
            for name in outer:
                part = part[name]
            part[last] = wrong
            index.write_text(json.dumps(whole[""]))
            sums.write_text(listed.replace(found, hashlib.sha256(index.read_bytes()).hexdigest()))
            with contextlib.suppress(UserError):
                tunekit.load(tuned.reference, bundle=directory)


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "artifacts", "a\0b", "n" * 5000])
def test_checksums_of_what_is_no_file_are_refused(tuned, make, name):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    with (directory / "SHA256SUMS").open("a") as sums:
        sums.write(f"{'0' * 64}  {name}\n")
    with pytest.raises(UserError, match="damaged"):
        tunekit.load(tuned.reference, bundle=directory)


def test_a_kernel_damaged_after_the_bundle_was_opened_is_refused(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    kernel = tunekit.load(tuned.reference, bundle=directory)
    so = directory / json.loads((directory / "bundle.json").read_text())["entries"][0]["file"]
    so.write_bytes(b"")
    with pytest.raises(UserError, match="is damaged"):
        kernel(torch.ones(64, 64))
    assert so.exists() and not (directory / "artifacts" / "quarantine").exists()


def renamed_axis(spec):
    first, *rest = spec.axes
    signature = tuple(
        replace(arg, shape=tuple("lines" if dim == "rows" else dim for dim in arg.shape))
        if isinstance(arg, TensorArg)
        else arg
        for arg in spec.signature
    )
    return replace(spec, axes=(replace(first, name="lines"), *rest), signature=signature, examples=())


CONTRACTS = {
    "it is for version 1, here 2": lambda spec: replace(spec, version=2),
    "it is for abacus machines": lambda spec: spec,
    "it is for host_scale": lambda spec: replace(spec, name="other"),
    r"its problem axes differ \(lines, rows\)": renamed_axis,
    "its axis cols differs": lambda spec: replace(
        spec, axes=(spec.axes[0], replace(spec.axes[1], default=16), spec.axes[2])
    ),
    "the arguments of rows=64 .* differ": lambda spec: replace(spec, signature=spec.signature[:2]),
}


@pytest.mark.parametrize("said", CONTRACTS)
def test_a_bundle_of_another_contract_is_refused(tuned, make, monkeypatch, said):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    with monkeypatch.context() as patched:
        if "abacus" in said:
            patched.setattr(bundling.platform, "machine", lambda: "abacus")
        directory = make()
    with pytest.raises(UserError, match=said) as caught:
        open_bundle(directory, CONTRACTS[said](tuned.spec))
    assert "does not fit" in str(caught.value) and "\n" not in str(caught.value)


def test_more_sizes_of_an_axis_are_the_same_contract(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    rows, cols, dtype = tuned.spec.axes
    more = replace(tuned.spec, axes=(rows, replace(cols, values=(*cols.values, 2048)), dtype))
    assert len(open_bundle(make(), more).entries) == 1


def test_another_sources_hash_does_not_matter_in_a_bundle(tuned, make, tmp_path):
    """The kernels are trusted by their hashes: an edited spec file with the same contract still serves them."""
    source = Path(tuned.reference.partition(".py:")[0] + ".py").read_text()
    edited = tmp_path / "host_scale.py"
    edited.write_text(source)
    tuned.reference = f"{edited}:host_scale"
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    edited.write_text(source + "\nEDITED = True\n")
    stale = tunekit.load(tuned.reference, **tuned.places)
    with pytest.raises(NoKernelError):
        stale(torch.ones(64, 64))
    kernel = tunekit.load(tuned.reference, bundle=directory)
    kernel(torch.ones(64, 64))
    assert kernel.stats()["exact"] == 1


def test_winners_from_elsewhere_are_labelled(tuned, make, caplog):
    """A bundle made on another machine is a fallback here, and is said to be one."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0, environment=replace(environment(0), cutlass_dsl="4.0.0"))
    kernel = tunekit.load(tuned.reference, bundle=make())
    choice = kernel.choice(torch.ones(64, 64))
    assert choice.level is Level.NEAREST and "cutlass_dsl 4.0.0" in choice.why
    assert "is served by nearest" in caplog.text


def test_what_a_bundle_lacks_is_said_with_the_command(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, bundle=make())
    with pytest.raises(NoKernelError, match=r"tunekit bundle .* --compile --out DIR") as caught:
        kernel(torch.ones(64, 32))
    assert "it is not in the bundle" in str(caught.value) and "tunekit sweep" not in str(caught.value)
    assert kernel.stats()["error"] == 1


def test_a_bundle_for_another_architecture_is_refused(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, bundle=make(), devices=Pretending("sm_90a"))
    with pytest.raises(NoKernelError, match="for host, and this device is sm_90a"):
        kernel(torch.ones(64, 64))


class Pretending:
    """The CPU, called a GPU of some architecture: nothing is launched on it."""

    def __init__(self, arch: str) -> None:
        self.arch = arch

    def facts(self, index: int) -> DeviceFacts:
        return DeviceFacts(index, self.arch, None, environment(0))


def test_a_bundle_serves_alone(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    for more in (tuned.places, {"compile": "allow"}):
        with pytest.raises(UserError, match="a bundle serves alone"):
            tunekit.load(tuned.reference, bundle=directory, **more)
    with pytest.raises(UserError, match="is no bundle"):
        tunekit.load(tuned.reference, bundle=tuned.root)


def test_the_users_winner_goes_before_the_shipped_one_and_one_of_each_gpu(tuned, make, monkeypatch):
    """Of one GPU's winners for a problem, the last one; two GPUs' stand side by side."""
    here = environment(0)
    other = replace(here, gpu="another", driver="1")
    ships = tuned.winner(tuned.variant(unroll=8, delay_us=0), {"rows": 64}, source="shipped")
    monkeypatch.setattr(bundling, "shipped_winners", lambda *_: [ships])
    mine = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    theirs = tuned.tune({"rows": 64}, unroll=2, delay_us=0, environment=other)
    directory = make()
    found = open_bundle(directory, tuned.spec)
    assert [winner.variant.id for winner in found.winners] == [mine.variant.id, theirs.variant.id]
    assert [winner.environment.gpu for winner in found.measured()] == [None, "another"]
    assert tunekit.load(tuned.reference, bundle=directory).choice(torch.ones(64, 64)).variant.id == mine.variant.id


def test_a_shipped_winner_is_kept_beside_one_that_goes_before_it(tuned, make, monkeypatch):
    """The ladder takes ours for 64 rows before the shipped one for 8; the bundle holds both."""
    ours = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    variant = tuned.variant(unroll=8, delay_us=0)
    tuned.compile(variant, rows=8)
    ships = tuned.winner(variant, {"rows": 8}, source="shipped")
    monkeypatch.setattr(bundling, "shipped_winners", lambda *_: [ships])
    found = open_bundle(make(), tuned.spec)
    assert [winner.variant.id for winner in found.measured()] == [ours.variant.id]
    assert [winner.variant.id for winner in found.shipped()] == [ships.variant.id]


def test_a_shipped_winner_stays_a_shipped_one(tuned, make, monkeypatch):
    variant = tuned.variant(unroll=8, delay_us=0)
    tuned.compile(variant, rows=64)
    ships = tuned.winner(variant, {"rows": 64}, source="shipped")
    monkeypatch.setattr(bundling, "shipped_winners", lambda *_: [ships])
    kernel = tunekit.load(tuned.reference, bundle=make())
    assert kernel.choice(torch.ones(64, 64)).level is Level.SHIPPED


def test_a_bundle_for_chosen_problems_holds_what_serves_them(tuned, make):
    """rows=48 is served by its bucket's winner; cols=16 has none: the spec's default, compiled on demand."""
    winner = tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    tuned.tune({"rows": 8, "cols": 128}, unroll=2, delay_us=0)
    directory = make("some", {"rows": 48}, {"rows": 5, "cols": 16}, compile=True)
    found = open_bundle(directory, tuned.spec)
    assert [(entry.problem.rows, entry.problem.cols) for entry in found.entries] == [(48, 64), (5, 16)]
    assert [each.variant.id for each in found.winners] == [winner.variant.id]
    kernel = tunekit.load(tuned.reference, bundle=directory)
    assert kernel.choice(torch.ones(48, 64)).level is Level.BUCKET
    assert kernel.choice(torch.ones(5, 16)).level is Level.DEFAULT
    assert kernel(torch.ones(5, 16)).shape == (5, 16)


def test_what_is_not_compiled_is_left_out_or_compiled(tuned, make, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    tuned.tune({"rows": 8, "cols": 16}, unroll=2, delay_us=0, compiled=False)
    out = tmp_path / "one"
    done = bundle(tuned.spec, tuned.reference, "host", out, Settings(**tuned.places))
    ((left),) = done.left_out
    assert (left.problem.cols, left.variant.tunables.unroll, done.kernels) == (16, 2, 1)
    assert (
        left.command.startswith("tunekit compile") and f"--variant {left.variant.id} --problem rows=8" in left.command
    )
    done = bundle(tuned.spec, tuned.reference, "host", out, Settings(**tuned.places), compile=True, force=True)
    assert (done.left_out, done.kernels, done.problems) == ((), 2, 2)


def test_where_nothing_is_compiled_nothing_is_written(tuned, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0, compiled=False)
    out = tmp_path / "none"
    with pytest.raises(UserError, match=r"none of the 1 variants .* --compile compiles them"):
        bundle(tuned.spec, tuned.reference, "host", out, Settings(**tuned.places))
    assert not out.exists() and [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_bundle_never_takes_the_place_of_something_else(tuned, make, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    before = (directory / "SHA256SUMS").read_text()
    with pytest.raises(UserError, match="is a bundle already; --force replaces it"):
        make()
    make(force=True)
    assert (directory / "SHA256SUMS").read_text() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds something that is no bundle"):
        make("mine", force=True)
    (tmp_path / "empty").mkdir()
    assert make("empty") == tmp_path / "empty"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "cache", "empty", "mine"]


def test_a_bundle_is_put_where_a_link_leads_but_not_under_the_feet(tuned, make, tmp_path, monkeypatch):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    (tmp_path / "link").symlink_to("real")
    for force in (False, True):
        made = make("link", force=force)
        assert made.is_symlink() and (tmp_path / "real" / "bundle.json").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError, match="is where this runs"):
        bundle(tuned.spec, tuned.reference, "host", Path(), Settings(**tuned.places))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "here", "link", "real"]


def test_a_failed_bundle_leaves_the_old_one(tuned, make, monkeypatch, tmp_path):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle_writer, "_sums", full)
    with pytest.raises(UserError, match="No space left on device"):
        make(force=True)
    tunekit.load(tuned.reference, bundle=directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "cache"]


def test_refreshing_a_bundle_serves_the_same(tuned, make):
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    kernel = tunekit.load(tuned.reference, bundle=make(), strict=True)
    x = torch.randn(64, 64)
    first = kernel(x)
    kernel.refresh()
    assert torch.equal(kernel(x), first) and kernel.choice(x).level is Level.EXACT


def test_the_licence_of_an_installed_tunekit_is_in_its_metadata(tmp_path, monkeypatch):
    """Not whatever LICENSE lies beside the installed package."""
    (tmp_path / "LICENSE").write_text("somebody else's")
    licences = tmp_path / "tunekit-1.0.dist-info" / "licenses"
    licences.mkdir(parents=True)
    (licences.parent / "METADATA").write_text("Metadata-Version: 2.4\nName: tunekit\nVersion: 1.0\n")
    (licences / "LICENSE").write_text("ours")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(bundle_writer, "__file__", str(tmp_path / "tunekit" / "store" / "bundle_writer.py"))
    assert bundle_writer.own_licence() == "ours"


# -- a real GPU kernel, cross-compiled; nothing of it is launched here

CUTE = f"{Path(__file__).parents[1] / 'specs' / 'cute_small.py'}:cute_scale"
LOAD = """
import sys, tunekit, torch
from tunekit.dispatch.devices import DeviceFacts
from tunekit.dispatch.hot_path import native_parts
from tunekit.environment import environment

class H200:
    def facts(self, index):
        return DeviceFacts(index, "sm_90a", None, environment(0))

kernel = tunekit.load(sys.argv[1], bundle=sys.argv[2], devices=H200())
print(kernel.choice(torch.ones(1024)).level, kernel.stats()["loaded"], environment(0).cutlass_dsl)
"""


@pytest.fixture(scope="module")
def cute(tmp_path_factory) -> Path:
    """A bundle of one CuTeDSL kernel for sm_90a, compiled without a GPU."""
    pytest.importorskip("cutlass", reason="compiles a CuTeDSL kernel")
    root, spec = tmp_path_factory.mktemp("cute"), load_spec(CUTE)
    places = Settings(root / "tunekit.db", root / "artifacts", jobs=1)
    done = bundle(spec, CUTE, "sm_90a", root / "bundle", places, [spec.problem({})], compile=True)
    assert (done.kernels, done.left_out) == (1, ())
    return root / "bundle"


def test_a_gpu_kernel_in_a_bundle_says_what_it_needs(cute):
    index = json.loads((cute / "bundle.json").read_text())
    (entry,) = index["entries"]
    assert index["needs"] == {
        "apache-tvm-ffi": distribution_version("apache-tvm-ffi"),
        "nvidia-cutlass-dsl-libs-cu12": distribution_version("nvidia-cutlass-dsl"),
    }
    assert [(each["name"], each["role"]) for each in entry["arguments"]] == [
        ("x", "input"), ("y", "output"), ("scale", "number"),
    ]  # fmt: skip
    names = f"__tvm_ffi_{entry['symbol']}".encode()
    content = (cute / entry["file"]).read_bytes()
    assert names in content and content.startswith(b"\x7fELF")
    assert {path.suffix for path in (cute / "artifacts" / "objects").rglob("*.*")} == {".so"}


def test_without_the_runtime_library_one_sentence_says_what_to_install(cute, bare):
    done = child(LOAD, CUTE, cute, site=bare)
    words = done.stderr.splitlines()[-1]
    assert words.startswith(f"tunekit.errors.UserError: bundle {cute} can't be served: {RUNTIME_LIBRARY}")
    version = distribution_version("nvidia-cutlass-dsl")
    assert f"pip install --no-deps nvidia-cutlass-dsl-libs-cu12=={version}" in words


@pytest.mark.slow
def test_the_runtime_library_alone_is_enough(cute, bare, tmp_path):
    """On the linker's path, or as its package alone lays it out: the kernel loads with no compiler installed."""
    library = runtime_library()
    assert library is not None
    by_path = child(LOAD, CUTE, cute, site=bare, LD_LIBRARY_PATH=str(library.parent))
    assert by_path.stdout.split() == ["default", "1", "None"], by_path.stderr
    place = tmp_path / "nvidia_cutlass_dsl" / "cu12" / "lib"
    place.mkdir(parents=True)
    (place / RUNTIME_LIBRARY).symlink_to(library)
    alone = child(LOAD, CUTE, cute, site=bare, PYTHONPATH=f"{ROOT}:{bare}:{tmp_path}")
    assert alone.stdout.split() == ["default", "1", "None"], alone.stderr


def test_the_newest_version_is_told_by_its_numbers():
    assert newest(["4.8.1", "4.10.0", "4.9"]) == "4.10.0" and newest([]) is None


def test_the_key_of_what_a_bundle_lacks_is_found_without_a_word_written_there(tuned, make):
    """As that of a package's function, which is no file of the bundle."""
    tuned.tune({"rows": 64}, unroll=4, delay_us=0)
    directory = make()
    before = aged(directory)
    library = open_library(tuned.spec, directory)
    lacking = Candidate(Level.DEFAULT, "", tuned.variant(unroll=2, delay_us=0))
    assert library.present_key(lacking, tuned.spec.problem({"rows": 64}))
    assert dates(directory) == before
