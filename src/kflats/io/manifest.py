"""The manifest of a folder that kflats wrote: size and SHA-256 of every file. It shows changes by other programs.

    {"format": "kflats-manifest", "version": 1, "files": {"config.json": {"bytes": 812, "sha256": "9f86..."}, ...}}

Names are relative to the folder, with "/" between their parts. The manifest does not list itself. Empty subfolders do
not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kflats.common.hashing import sha256_of_file
from kflats.common.schema import decode
from kflats.io.atomic_files import replaced

MANIFEST = "kflats_manifest.json"
_FORMAT, _VERSION = "kflats-manifest", 1


@dataclass(frozen=True)
class Entry:
    """Size in bytes and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class _Manifest:
    format: str
    version: int
    files: dict[str, Entry]


def write_manifest(folder: Path) -> None:
    """List all files of ``folder`` in its manifest, an earlier manifest replaced."""
    _write(folder, {name: _entry(path) for name, path in _files(folder).items()})


def differences(folder: Path) -> list[str]:
    """The files of ``folder`` that differ from its manifest, a name and a reason each; [] where kflats wrote all files.

    Files are compared by name first, then by size, then by SHA-256; the first comparison that shows a difference ends
    the search. A link is a difference, since kflats writes none.
    """
    entries, files = _read(folder), _files(folder)
    if entries is None:
        return sorted(f"{name} (no manifest lists it)" for name in files)
    changes = [f"{name} (not written by kflats)" for name in files.keys() - entries.keys()]
    changes += [f"{name} (missing)" for name in entries.keys() - files.keys()]
    for size_only in (True, False):
        if not changes:
            changes = [f"{name} (changed)" for name, path in files.items() if not _same(path, entries[name], size_only)]
    return sorted(changes)


@contextmanager
def manifest_follows(folder: Path, *names: str) -> Iterator[None]:
    """Renew the entries of files that kflats itself changes or adds inside this context.

    A file that another program changed or added before stays a difference: its entry stays old or missing.

    Args:
        folder: the folder with the manifest. Without a manifest nothing happens.
        names: of the files inside that may change; the name of a subfolder stands for all files in it.
    """
    entries = _read(folder)
    if entries is None:
        yield
        return
    before = _chosen(folder, names)
    foreign = {name for name, path in before.items() if name not in entries or not _same(path, entries[name])}
    yield
    after = _chosen(folder, names)
    kept = {name: entry for name, entry in entries.items() if name in foreign or name not in before}
    _write(folder, kept | {name: _entry(path) for name, path in after.items() if name not in foreign})


def _files(folder: Path) -> dict[str, Path]:
    """All files and links in ``folder``, by their names in the manifest."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir())
    files = {path.relative_to(folder).as_posix(): path for path in paths}
    if (own := files.get(MANIFEST)) is not None and own.is_file() and not own.is_symlink():
        del files[MANIFEST]
    return files


def _chosen(folder: Path, names: tuple[str, ...]) -> dict[str, Path]:
    return {
        name: path
        for name, path in _files(folder).items()
        if any(name == one or name.startswith(one + "/") for one in names)
    }


def _entry(path: Path) -> Entry:
    return Entry(path.stat().st_size, sha256_of_file(path))


def _same(path: Path, entry: Entry, size_only: bool = False) -> bool:
    if path.is_symlink() or not path.is_file() or path.stat().st_size != entry.bytes:
        return False
    return size_only or sha256_of_file(path) == entry.sha256


def _read(folder: Path) -> dict[str, Entry] | None:
    """The entries of the manifest; None where no manifest can be read."""
    path = folder / MANIFEST
    if path.is_symlink() or not path.is_file():
        return None
    try:
        manifest: _Manifest = decode(_Manifest, json.loads(path.read_text(encoding="utf-8")), "manifest")
    except (OSError, ValueError, RecursionError):
        return None
    return manifest.files if (manifest.format, manifest.version) == (_FORMAT, _VERSION) else None


def _write(folder: Path, entries: dict[str, Entry]) -> None:
    text = json.dumps(asdict(_Manifest(_FORMAT, _VERSION, dict(sorted(entries.items())))), indent=1)
    with replaced(folder / MANIFEST) as aside:
        aside.write_text(text + "\n", encoding="utf-8")
