"""The images of a run, each once: ``RUN/images/SHA256.png``; their pixels, of which the latest stay in memory.

A file is written whole or not at all, and before any line that names it, so what a dump names can be read.
"""

from __future__ import annotations
import base64
import hashlib
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar
from areal_lite.api.image_span import ImageSpan, is_sha256
from areal_lite.data.vision.image_processor import ImageProcessor
from areal_lite.errors import ConfigError
from areal_lite.files.whole_files import storing, write_whole

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
MAX_BYTES = 64 << 20
"""Bytes that a process keeps of one form of its images."""


class Latest(Generic[T]):
    """Values of digests, made by ``make``; the latest stay, with at most ``max_bytes`` of ``size``. Thread-safe."""

    def __init__(self, make: Callable[[str], T], size: Callable[[T], int], max_bytes: int) -> None:
        self._make, self._size, self._max_bytes = make, size, max_bytes
        self._kept: dict[str, T] = {}  # the latest last
        self._bytes = 0
        self._lock = threading.Lock()

    def __call__(self, sha256: str) -> T:
        """Return the value of one digest; errors as ``make``."""
        with self._lock:
            if sha256 in self._kept:
                value = self._kept.pop(sha256)
            else:
                value = self._make(sha256)
                self._bytes += self._size(value)
            self._kept[sha256] = value
            while self._bytes > self._max_bytes and len(self._kept) > 1:
                self._bytes -= self._size(self._kept.pop(next(iter(self._kept))))
        return value


class ImageStore:
    """Canonical PNG files by the hex digest of their bytes. Several threads and processes may share a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @classmethod
    def of_run(cls, run_dir: Path) -> ImageStore:
        """Return the images of the run in a folder."""
        return cls(run_dir / "images")

    def put(self, png: bytes) -> str:
        """Store an image and return its digest; raises StorageError if it cannot be written."""
        sha256 = hashlib.sha256(png).hexdigest()
        path = self.path(sha256)
        if not path.exists():
            with storing(path):
                write_whole(path, png)
        return sha256

    def path(self, sha256: str) -> Path:
        """Return where the image is; the digest is checked, so a path never leaves the folder."""
        if not is_sha256(sha256):
            raise ValueError(f"{sha256[:80]!r} is not a sha256: give 64 hexadecimal digits")
        return self.folder / f"{sha256}.png"

    def read(self, sha256: str) -> bytes:
        """Return the PNG; ConfigError if it is missing or not what its name says."""
        path = self.path(sha256)
        try:
            png = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"the image {path} cannot be read ({error}): copy it back from where it was") from error
        if (found := hashlib.sha256(png).hexdigest()) != sha256:
            raise ConfigError(f"the image {path} has changed, its sha256 is {found}: copy it back from where it was")
        return png


class EncodedImages(Latest[str]):
    """Reads the images of ``store`` in base64."""

    def __init__(self, store: ImageStore, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(lambda sha256: base64.b64encode(store.read(sha256)).decode(), len, max_bytes)

    def of(self, images: Iterable[ImageSpan]) -> dict[str, str]:
        """Return the PNG of each image, once, by its digest; errors as :meth:`ImageStore.read`."""
        return {sha256: self(sha256) for sha256 in {span.sha256 for span in images}}


class ImagePixels(Latest["dict[str, Tensor]"]):
    """Reads the images of ``store`` with a model's processor: the model's inputs of each."""

    def __init__(self, store: ImageStore, processor: ImageProcessor, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(lambda sha256: processor.pixels(store.read(sha256)), _size, max_bytes)


def _size(pixels: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in pixels.values())
