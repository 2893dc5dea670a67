"""Which version of a distribution is installed, read from the directories of sys.path."""

from __future__ import annotations

import importlib.metadata
import sys
import zipfile
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from tunekit import identity
from tunekit.identity import distribution_version

NAME = "Tunekit.Nowhere-else"
METADATA = f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.2.post3\n\nVersion: no header\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


def forget() -> None:
    """What is installed is looked for again."""
    distribution_version.cache_clear()
    identity._records_in.cache_clear()


def test_every_installed_distribution_is_told_as_importlib_tells_it() -> None:
    names = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    assert len(names) > 5
    assert {name: distribution_version(name) for name in names} == {n: importlib.metadata.version(n) for n in names}
    assert distribution_version(NAME) is None


@pytest.mark.parametrize(
    "file",
    [
        "tunekit_nowhere_else-1.2.post3.dist-info/METADATA",
        "Tunekit.Nowhere_else-1.2.post3.dist-info/METADATA",
        "tunekit_nowhere_else.egg-info/PKG-INFO",
        "tunekit_nowhere_else-1.2.post3-py3.11.egg-info",
        "Tunekit.Nowhere_else-1.2.post3-py3.11.egg/EGG-INFO/PKG-INFO",
    ],
)
def test_every_way_to_record_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(METADATA)
    egg = next((parent for parent in path.parents if parent.suffix == ".egg"), None)
    monkeypatch.syspath_prepend(str(egg or tmp_path))
    assert distribution_version(NAME) == importlib.metadata.version(NAME) == "1.2.post3"


def test_the_first_on_the_path_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("later", "1.0"), ("first", "2.0")):
        record = tmp_path / name / f"tunekit_nowhere_else-{version}.dist-info"
        record.mkdir(parents=True)
        (record / "METADATA").write_text(f"Name: {NAME}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / name))
    assert distribution_version(NAME) == importlib.metadata.version(NAME) == "2.0"


@pytest.mark.parametrize(
    "metadata",
    [
        f"Name: {NAME}\nVersion: 1.2+cu128.dirty\n\n",
        f"Name: {NAME}\r\nVersion: 1.2+cu128.dirty\r\n\r\n",
        f"Name: {NAME}\nLicense: a\n        \n        b\nversion: 1.2+cu128.dirty\nKeywords: \n",
        f"Name: {NAME}\nDescription: a\n        Version: none\nVersion: 1.2+cu128.dirty\n\n",
    ],
    ids=["local version", "CRLF", "a blank line in a header", "a header in a header"],
)
def test_a_version_is_the_header_that_importlib_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: str
) -> None:
    record = tmp_path / "tunekit_nowhere_else-1.2.dist-info"
    record.mkdir()
    (record / "METADATA").write_bytes(metadata.encode())
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution_version(NAME) == importlib.metadata.version(NAME) == "1.2+cu128.dirty"


def test_what_an_uninstallation_left_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("1.0", "2.0", "3.0"):
        (tmp_path / f"tunekit_nowhere_else-{version}.dist-info").mkdir()
    (tmp_path / "tunekit_nowhere_else-2.0.dist-info" / "METADATA").write_text("Version: 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert distribution_version(NAME) == "2.0"


def test_archives_and_other_finders_are_left_to_importlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "library.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("tunekit_nowhere_else-1.2.post3.dist-info/METADATA", METADATA)
    monkeypatch.syspath_prepend(str(archive))
    assert distribution_version(NAME) == "1.2.post3"
    monkeypatch.undo()
    forget()

    class Elsewhere(importlib.metadata.Distribution):
        def read_text(self, filename: str) -> str | None:
            return METADATA if filename == "METADATA" else None

        def locate_file(self, path: object) -> Path:
            return tmp_path

    class Finder:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            return None

        @staticmethod
        def find_distributions(context: importlib.metadata.DistributionFinder.Context) -> list[Elsewhere]:
            return [Elsewhere()] if context.name == NAME else []

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder])
    assert distribution_version(NAME) == "1.2.post3"
