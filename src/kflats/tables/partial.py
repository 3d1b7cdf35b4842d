"""Finished files of rows of an unfinished run, kept beside the output: the same command takes them over."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kflats.common.errors import KflatsError
from kflats.common.hashing import sha256
from kflats.common.release import version
from kflats.common.schema import decode, read_json
from kflats.io.atomic import beside, write_json
from kflats.tables.index import shard_name
from kflats.tables.layout import RowCode
from kflats.tables.shards import Shard, ShardRecord

_FORMAT, _VERSION = "kflats-table-part", 1


@dataclass(frozen=True)
class TablePart:
    """One finished file of rows, and their squared error."""

    record: ShardRecord
    error: float


@dataclass(frozen=True)
class _Rejected:
    total: int


class PartialTable:
    """Files of one source in one code, in ``.<name>.kflats-partial/<fingerprint>`` beside ``out``.

    The fingerprint covers all rows, by their checksums, and the whole code: files of other rows, or under other
    options, are not taken.

    Args:
        out: the folder to be.
        rows: checksums of the rows, as they are read.
        shard_rows: rows a file.
        code: of the rows.
    """

    def __init__(self, out: Path, rows: Sequence[int], shard_rows: int, code: RowCode) -> None:
        parts = [version(), type(code).__name__, str((shard_rows, *rows))]
        tensors = (part for item in sorted(code.tensors().items()) for part in item)
        self.folder = beside(out, "partial") / sha256([*parts, *tensors])[:24]

    def remove_others(self) -> None:
        """Remove files in other codes, which nothing will take over."""
        for folder in self._of_codes("/"):
            if folder != self.folder:
                shutil.rmtree(folder, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove the files of all codes, and what is known of codes."""
        for folder in self._of_codes("/"):
            shutil.rmtree(folder, ignore_errors=True)
        for note in self._of_codes(".json"):
            note.unlink(missing_ok=True)
        with suppress(OSError):  # finished weights of a model's run to the same output
            self.folder.parent.rmdir()

    def _of_codes(self, ending: str) -> list[Path]:
        """What bears the fingerprint of a code: the folder may be a link to one that holds other things, too."""
        found = self.folder.parent.glob(f"*{ending}")
        return [path for path in found if re.fullmatch("[0-9a-f]{24}", path.name.removesuffix(ending))]

    def rejected(self) -> int | None:
        """The bytes of a table in this code, where they were counted and did not suit."""
        try:
            note: _Rejected = decode(_Rejected, read_json(self._rejection, _FORMAT, _VERSION, "note"), "note")
        except KflatsError:
            return None
        return note.total

    def reject(self, total: int) -> None:
        """A table in this code takes so many bytes, which do not suit."""
        write_json(self._rejection, _FORMAT, _VERSION, total=total)

    def get(self, number: int) -> TablePart | None:
        """Of file ``number``, if it is there and whole: each of its bytes is compared with its checksum."""
        try:
            part: TablePart = decode(TablePart, read_json(self._note(number), _FORMAT, _VERSION, "note"), "note")
            Shard(self.path(number), part.record).check_all()
        except KflatsError:
            return None
        return part

    def put(self, number: int, part: TablePart) -> None:
        """File ``number`` is finished, and at its place."""
        record = {"bytes": part.record.bytes, "checksum": part.record.checksum}
        write_json(self._note(number), _FORMAT, _VERSION, record=record, error=part.error)

    def move_to(self, folder: Path, count: int) -> None:
        """Move the first ``count`` files into ``folder``."""
        for number in range(count):
            self.path(number).replace(folder / shard_name(number))

    @property
    def _rejection(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.json")

    def path(self, number: int) -> Path:
        """Of file ``number``."""
        return self.folder / shard_name(number)

    def _note(self, number: int) -> Path:
        return self.path(number).with_suffix(".json")
