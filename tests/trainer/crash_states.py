"""What a disk may hold after a crash: every state that the order of operations allows, as a plain tree of bytes.

A file's content is sure to be there after an fsync of the file, its name after an fsync of its folder; until then
either may be there or not, and a content up to any block.
"""

from __future__ import annotations
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
import pytest

Tree = dict[str, bytes | None]
"""Content by path; None is a folder."""
BLOCK = 64


class Recorder:
    """Watches what happens below ``root`` and collects the states that a crash could leave, each once."""

    def __init__(self, root: Path) -> None:
        self.states: dict[frozenset[tuple[str, bytes | None]], None] = {}
        self._root = root
        self._ids: dict[int, int] = {}  # by inode, until that is used again
        self._next = 0
        self._contents: dict[int, bytes] = {}
        self._synced: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._synced_names: dict[int, dict[str, int]] = {}
        self._look()
        self._synced, self._synced_names = dict(self._contents), dict(self._names)

    @contextmanager
    def watching(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        """Look at the disk before and after each operation that changes names or flushes."""
        with patch.context() as here:
            for name, after in (
                ("fsync", self._flushed),
                ("rename", None),
                ("mkdir", None),
                ("unlink", None),
                ("rmdir", None),
            ):
                here.setattr(os, name, self._watched(getattr(os, name), after, forget=name in ("unlink", "rmdir")))
            yield
        self._collect()

    def _watched(self, real: Any, after: Callable[[int], None] | None, *, forget: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._collect()
            gone = os.stat(args[0], dir_fd=kwargs.get("dir_fd")).st_ino if forget else None
            result = real(*args, **kwargs)
            if gone is not None:
                self._ids.pop(gone, None)
            if after is not None:
                after(args[0])
            self._collect()
            return result

        return call

    def _flushed(self, descriptor: int) -> None:
        inode = self._ids.get(os.fstat(descriptor).st_ino)
        if inode in self._names:
            self._synced_names[inode] = dict(self._names[inode])
        elif inode in self._contents:
            self._synced[inode] = self._contents[inode]

    def _look(self) -> None:
        """Read the disk as it is."""
        self._contents, self._names = {}, {}
        self._root_id = self._visit(self._root)

    def _visit(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._ids:
            self._ids[inode], self._next = self._next, self._next + 1
        number = self._ids[inode]
        if path.is_dir():
            self._names[number] = {child.name: self._visit(child) for child in path.iterdir()}
        else:
            self._contents[number] = path.read_bytes()
        return number

    def _collect(self) -> None:
        self._look()
        folders = self._names.keys() | self._synced_names.keys()
        files = self._contents.keys() | self._synced.keys()
        kept = {number: self._names.get(number, self._synced_names.get(number, {})) for number in folders}
        lost = {number: self._synced_names.get(number, {}) for number in folders}
        whole = {number: self._contents.get(number, self._synced.get(number, b"")) for number in files}
        empty = {number: self._synced.get(number, b"") for number in files}
        for names in (kept, lost):
            self._add(names, whole)
            self._add(names, empty)
        for number in folders:
            if kept[number] != lost[number]:  # one folder's new names alone are lost, or alone are there
                self._add(kept | {number: lost[number]}, whole)
                self._add(kept | {number: lost[number]}, empty)
                self._add(lost | {number: kept[number]}, whole)
        for number in files:
            if whole[number] != empty[number]:  # one file is lost or torn
                for end in range(0, len(whole[number]), BLOCK):
                    self._add(kept, whole | {number: whole[number][:end]})

    def _add(self, names: dict[int, dict[str, int]], contents: dict[int, bytes]) -> None:
        tree: Tree = {}

        def walk(number: int, path: str) -> None:
            for name, child in names.get(number, {}).items():
                where = f"{path}{name}"
                tree[where] = contents.get(child)
                if child in names:
                    walk(child, f"{where}/")

        walk(self._root_id, "")
        self.states[frozenset(tree.items())] = None


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """Have every file take that many bytes and no more, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def change_tree(root: Path, before: Tree, after: Tree) -> None:
    """Turn what is below ``root`` from one state into another."""
    for name in sorted(before.keys() - after.keys(), reverse=True):
        if before[name] is None:
            (root / name).rmdir()
        else:
            (root / name).unlink()
    for name in sorted(name for name in after if name not in before or before[name] != after[name]):
        content = after[name]
        if content is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(content)
