"""Images of dumped turns, and the marker that stands for each where tokens are shown as text."""

import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from areal_lite.api.image_span import Images, ImageSpan, check_images, images_of
from areal_lite.data.vision.image_processor import FAMILIES
from areal_lite.tools.foreign_files import open_inside

_PLACEHOLDERS = tuple(family.placeholder for family in FAMILIES.values())


def dumped_images(turn: Mapping[str, Any]) -> Images:
    """Return the images of a dumped turn, all inside its tokens; none if the line says otherwise."""
    with suppress(ValueError):
        images = images_of(turn.get("images") or [])
        check_images(images, len(turn.get("ids") or ()))
        return images
    return ()


def image_marker(image: ImageSpan, root: Path) -> str:
    """Return digest, pixels and tokens of an image of the run in ``root``."""
    size = "its file is missing"
    with suppress(OSError, struct.error), open_inside(root / "images" / f"{image.sha256}.png", root) as file:
        width, height = struct.unpack(">16x2I", file.read(24))  # the header of a PNG
        size = f"{width} x {height} pixels"
    return f"[image {image.sha256[:12]}, {size}, {image.length} tokens]"


def marked_text(turn: Mapping[str, Any], root: Path) -> str:
    """Return the text of a dumped turn with a marker in place of the tokens of each image."""
    marked, rest = "", str(turn["text"])
    for image in dumped_images(turn):
        places = (placeholder * image.length for placeholder in _PLACEHOLDERS)
        if place := next((place for place in places if place in rest), None):  # no other text of a prompt has it
            before, _, rest = rest.partition(place)
            marked += before + image_marker(image, root)
    return marked + rest
