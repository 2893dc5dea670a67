"""Writing a bundle: whole, under another name, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tunekit.errors import DatabaseError, UserError
from tunekit.model import Artifact
from tunekit.store import bundle as layout
from tunekit.store import files, lines
from tunekit.store.artifacts import ArtifactStore
from tunekit.store.bundle import Bundle, Entry, is_bundle

NOTICE = """\
The kernels in artifacts/ were compiled by tunekit {tunekit} from the spec {spec}, those for NVIDIA GPUs by
nvidia-cutlass-dsl {dsl} (NVIDIA Software License Agreement). No file of that package is in here: where its runtime
library is needed, it comes from an installation of its own (see "needs" in bundle.json).
tunekit and its specs: tunekit.txt. Kernels of a spec of your own: as you say.
"""


@dataclass(frozen=True)
class Part:
    """An entry still to be placed, with the artifact that it stands for."""

    entry: Entry
    artifact: Artifact


def check_target(out: Path, *, force: bool) -> None:
    """Refuse a place where a bundle can't be put.

    Raises:
        UserError: a file, a directory that holds something else, or a bundle and not `force`; the current
            directory; or nothing can be written there.
    """
    if out.resolve() == Path.cwd():
        raise UserError(
            f"{out} is where this runs, and a bundle takes a directory's place; name one in it, or beside it"
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; --out names a directory that the bundle becomes")
    if out.is_dir() and any(out.iterdir()):
        if not is_bundle(out):
            raise UserError(f"{out} holds something that is no bundle; name another directory, or empty it")
        if not force:
            raise UserError(f"{out} is a bundle already; --force replaces it")
    unwritable = files.unwritable(out.absolute().parent)
    if unwritable:
        raise UserError(f"can't write {out}: {unwritable}")


def write_bundle(
    bundle: Bundle,
    parts: Iterable[Part],
    source: ArtifactStore,
    *,
    besides: Iterable[Artifact] = (),
    force: bool = False,
) -> Bundle:
    """Write `bundle` with the entries of `parts`, and artifacts `besides`, copied from `source`, to ``bundle.root``.

    Readers of an older bundle there see all of it or all of the new one, but for the instant between two renames.

    Raises:
        UserError: as :func:`check_target`.
        DatabaseError: a file can't be read or written.
    """
    check_target(bundle.root, force=force)
    out = bundle.root.resolve()  # a link stays one
    try:
        with _beside(out) as scratch:
            whole = _fill(scratch, bundle, parts, besides, source)
            _publish(scratch, out)
    except OSError as error:
        raise DatabaseError(f"can't write {error.filename or out}: {error.strerror}") from error
    return replace(whole, root=bundle.root)


def _fill(
    scratch: Path, bundle: Bundle, parts: Iterable[Part], besides: Iterable[Artifact], source: ArtifactStore
) -> Bundle:
    (scratch / layout.ARTIFACTS).mkdir()
    target = ArtifactStore(scratch / layout.ARTIFACTS)

    def place(artifact: Artifact) -> str:
        """Copy the one file that is loaded; its name in the bundle."""
        kept = target.put(
            artifact.key,
            artifact.symbol,
            {artifact.role: source.path(artifact)},
            footprint=artifact.footprint,
            facts=artifact.facts,
            seconds=artifact.seconds,
        )
        return target.path(kept).relative_to(scratch).as_posix()

    placed: dict[str, str] = {}
    entries = []
    for part in parts:
        key = part.entry.key
        if key not in placed:
            placed[key] = place(part.artifact)
        entries.append(replace(part.entry, file=placed[key]))
    for artifact in besides:
        place(artifact)
    shutil.rmtree(target.root / "scratch", ignore_errors=True)
    whole = replace(bundle, entries=tuple(entries))
    written = {
        layout.INDEX: _index_text(whole),
        layout.WINNERS: "".join(f"{lines.winner_line(winner)}\n" for winner in whole.winners),
        **_licences(whole),
    }
    for name, text in written.items():
        path = scratch / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (scratch / layout.SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in _sums(scratch)))
    return whole


def _index_text(bundle: Bundle) -> str:
    """``bundle.json``, each axis and each entry on a line of its own."""
    plain = layout.index_of(bundle)

    def dumped(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)

    fields = [
        f"{dumped(name)}: [\n  " + ",\n  ".join(map(dumped, value)) + "\n ]"
        if isinstance(value, list) and value
        else f"{dumped(name)}: {dumped(value)}"
        for name, value in plain.items()
    ]
    return "{\n " + ",\n ".join(fields) + "\n}\n"


def _licences(bundle: Bundle) -> Mapping[str, str]:
    made = bundle.made_with
    notice = NOTICE.format(tunekit=made.get("tunekit"), spec=bundle.spec, dsl=made.get("nvidia-cutlass-dsl"))
    found = {f"{layout.LICENCES}/NOTICE.txt": notice}
    own = own_licence()
    return {**found, f"{layout.LICENCES}/tunekit.txt": own} if own else found


def own_licence() -> str | None:
    """tunekit's licence: of the checkout that runs, or of the installed package."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file() and (checkout / "LICENSE").is_file():
        return (checkout / "LICENSE").read_text("utf-8")
    try:
        return importlib.metadata.distribution("tunekit").read_text("licenses/LICENSE")
    except importlib.metadata.PackageNotFoundError:
        return None


def _sums(root: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(root.rglob("*")):
        if path.is_file():
            yield path.relative_to(root).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def _beside(out: Path) -> Iterator[Path]:
    """A new directory on the file system of `out`; gone afterwards, unless it was renamed."""
    parent = out.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    scratch = parent / f".{out.name}.{files.fresh_name()}"
    scratch.mkdir()
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, out: Path) -> None:
    for path in scratch.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if out.is_dir() and any(out.iterdir()):
        with _beside(out) as old:
            os.rename(out, old)
            try:
                os.rename(scratch, out)
            except OSError:
                os.rename(old, out)
                raise
    else:
        os.rename(scratch, out)
    files.fsync_directory(out.absolute().parent)
