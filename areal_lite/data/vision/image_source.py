"""The bytes of an image that a dataset row or an agent names; what they are is checked when they are decoded.

Guarantees that a row reads no file outside the folder of its data, also not through a link, and opens no socket unless
``image_urls`` of its dataset is set; an agent's request does neither.
"""

from __future__ import annotations
import base64
import binascii
import io
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from areal_lite.config.dataset_config import RowsConfig
from areal_lite.data.vision.canonical_image import MAX_ENCODED_BYTES, ImageError

DOWNLOAD_TIMEOUT_S = 30.0
"""Timeout of reads from an image server, in seconds."""


def image_bytes(value: Any, rows: RowsConfig) -> bytes:
    """Return the image file of a row's value: its bytes, ``{"bytes": ..., "path": ...}`` from ``datasets``, a base64
    ``data:`` URL, a path (from the folder of ``rows.path``), an http(s) URL with ``rows.image_urls``, a PIL image, or a
    uint8 array ``[H, W]`` or ``[H, W, C]``. ImageError for anything else, or what cannot or must not be read."""
    if isinstance(value, Mapping):
        value = value.get("path") if value.get("bytes") is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if isinstance(value, str | Path):
        text = str(value)
        if text.startswith("data:"):
            return data_url_bytes(text)
        if not text.startswith(("http://", "https://")):
            return _file_bytes(text.removeprefix("file://"), rows)
        if not rows.image_urls:
            raise ImageError(
                "a URL is not fetched: set image_urls of the dataset to true, or put the image beside its data"
            )
        with urllib.request.urlopen(text, timeout=DOWNLOAD_TIMEOUT_S) as response:  # nosec B310 # only http(s), redirected too
            return response.read(MAX_ENCODED_BYTES + 1)  # type: ignore[no-any-return]
    return png_of(value)


def data_url_bytes(url: str) -> bytes:
    """Return what a base64 ``data:`` URL holds; another URL is an ImageError."""
    head, comma, encoded = url.partition(",")
    if not head.startswith("data:") or not comma or not head.endswith(";base64"):
        raise ImageError(f"{url[:40]!r} is no data URL: send data:image/png;base64,... (or jpeg, webp, gif)")
    return base64_bytes(encoded)


def base64_bytes(encoded: str) -> bytes:
    """Return what base64 text holds; ImageError if it is none or too long."""
    if len(encoded) > MAX_ENCODED_BYTES * 4 // 3 + 4:
        raise ImageError(f"the image has over {MAX_ENCODED_BYTES:,} bytes: send at most that many")
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the image is not base64 ({error}): encode the bytes of its file") from None


def _file_bytes(name: str, rows: RowsConfig) -> bytes:
    paths = [rows.path] if isinstance(rows.path, str) else rows.path
    folders = [folder for path in paths if path and (folder := _folder(path.partition("@")[2] or path)) is not None]
    for folder in folders:
        file = (folder / name).resolve()
        if file.is_relative_to(folder) and file.is_file():
            with file.open("rb") as opened:
                return opened.read(MAX_ENCODED_BYTES + 1)
    raise ImageError(
        f"no file {name[:200]!r} in {', '.join(map(str, folders)) or 'a folder of the dataset'}: a row names images by "
        "their path from the folder of its data, and none outside it"
    )


def _folder(path: str) -> Path | None:
    """Return the folder of the data at a local path, which may be a pattern; None if there is none."""
    found = Path(path).expanduser()
    while any(mark in str(found) for mark in "*?["):
        found = found.parent
    return (found if found.is_dir() else found.parent).resolve() if found.exists() else None


def png_of(value: Any) -> bytes:
    """Return a PIL image or an array as a PNG file in RGB; ImageError for another value."""
    from PIL import Image, ImageOps

    if hasattr(value, "dtype"):
        if str(value.dtype) != "uint8":
            raise ImageError(f"its dtype is {value.dtype}, not uint8")
        value = Image.fromarray(value)
    if not isinstance(value, Image.Image):
        raise ImageError(f"a {type(value).__name__} is not an image")
    file = io.BytesIO()
    ImageOps.exif_transpose(value).convert("RGB").save(file, "PNG", compress_level=1)
    return file.getvalue()
