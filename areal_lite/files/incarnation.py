"""The number of a run's start, in its folder: what an earlier start left running may write nothing there.

A lock cannot promise that: the file system of a node that was cut off drops it, and the node comes back.
"""

from pathlib import Path
from typing import Self
from areal_lite.errors import StorageError
from areal_lite.files.whole_files import storing, write_whole


class Incarnation:
    """The newest start of the run in ``folder``; 0 if none has a number."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "incarnation"
        self._number = self._read()

    @classmethod
    def begin(cls, folder: Path) -> Self:
        """Start the next one; for the process that holds the folder's lock."""
        own = cls(folder)
        own._number += 1
        with storing(own._file):
            write_whole(own._file, str(own._number).encode())
        return own

    def check(self) -> None:
        """Raise StorageError if the run has been started again since."""
        if (newest := self._read()) != self._number:
            raise StorageError(
                f"{self._file.parent} belongs to start {newest} of the run, and this is start {self._number}, which "
                "may write nothing there: it was taken for dead. End it"
            )

    def _read(self) -> int:
        text = self._file.read_text(errors="replace") if self._file.is_file() else "0"
        if not (text.isascii() and text.isdecimal()):
            raise StorageError(
                f"{self._file} has {text[:40]!r}, and must have the number of the run's newest start: write one there "
                "that is higher than any earlier start's, such as 1000"
            )
        return int(text)
