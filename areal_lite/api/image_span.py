"""Where an image stands in token ids, and which image it is. Its pixels are a file in the run's folder. An image is a
recorded span and is never found by searching ids: a placeholder token that the model samples is text."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ImageSpan(NamedTuple):
    """One image among token ids."""

    offset: int
    """Index of its first placeholder token, in the sequence or, for ``Turn.images``, in the turn."""
    length: int
    """Number of its placeholder tokens."""
    sha256: str
    """Hex digest of its canonical PNG."""
    grid: tuple[int, int, int]
    """Patches along time, height and width, as ``image_grid_thw``."""

    @property
    def end(self) -> int:
        return self.offset + self.length

    def moved(self, by: int) -> "ImageSpan":
        return self._replace(offset=self.offset + by)


Images = tuple[ImageSpan, ...]


def is_sha256(value: Any) -> bool:
    """Return whether ``value`` is a digest in 64 hexadecimal digits."""
    return isinstance(value, str) and len(value) == 64 and set(value) <= set("0123456789abcdef")


def images_of(plain: Any) -> Images:
    """Return spans of their JSON form, a list of objects; raises ValueError for anything else."""
    spans = []
    for value in plain if isinstance(plain, list) else [None]:
        if not isinstance(value, dict) or value.keys() != {"offset", "length", "sha256", "grid"}:
            raise ValueError(f"{str(value)[:80]} is no image: give a list of offset, length, sha256, grid")
        span = ImageSpan(**value)
        grid: Any = tuple(span.grid) if isinstance(span.grid, list | tuple) else ()
        numbers = [span.offset, span.length, *grid]
        if len(numbers) != 5 or not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{str(value)[:80]} is no image: offset, length and three sizes are whole numbers")
        if not is_sha256(span.sha256):
            raise ValueError(f"{str(span.sha256)[:80]!r} is no sha256: give 64 hexadecimal digits")
        spans.append(span._replace(grid=grid))
    return tuple(spans)


def plain_images(images: Sequence[ImageSpan]) -> list[dict[str, Any]]:
    """Return the JSON form of spans."""
    return [span._asdict() for span in images]


def check_images(images: Sequence[ImageSpan], length: int, loss_mask: "NDArray[np.bool_] | None" = None) -> None:
    """Check that spans are sorted, apart and inside ``length`` tokens, none of which trains; raises ValueError."""
    end = 0
    for number, span in enumerate(images):
        if span.length < 1 or span.offset < end or span.end > length:
            raise ValueError(
                f"image {number} has the tokens {span.offset} to {span.end} of {length}, after an image that ends at "
                f"{end}: spans must be sorted, apart, not empty, and inside the tokens"
            )
        if loss_mask is not None and loss_mask[span.offset : span.end].any():
            raise ValueError(f"loss_mask is True inside image {number}: placeholder tokens of an image do not train")
        end = span.end


def keyed_ids(ids: Sequence[int], images: Sequence[ImageSpan]) -> list[int]:
    """Return ids in which each image's are negative numbers of its own: equal keys have equal content."""
    keyed = list(ids)
    for span in images:
        first = -int(span.sha256[:15], 16) - 1 - span.length
        keyed[span.offset : span.end] = range(first, first + span.length)
    return keyed


def images_between(images: Iterable[ImageSpan], start: int, end: int) -> Images:
    """Return the spans in tokens ``start`` to ``end``, offset from ``start``; ValueError if that would cut an image."""
    inside = tuple(span.moved(-start) for span in images if span.offset < end and span.end > start)
    for span in inside:
        if span.offset < 0 or span.end > end - start:
            raise ValueError(f"the tokens {start} to {end} cut the image {span.sha256[:12]}: cut outside of images")
    return inside


def common_prefix(first: "NDArray[Any]", second: "NDArray[Any]") -> int:
    """Return how many (keyed) ids two sequences begin with together."""
    limit = min(len(first), len(second))
    differs = first[:limit] != second[:limit]
    return int(differs.argmax()) if differs.any() else limit
