"""Spans of images in token ids."""

from __future__ import annotations
import numpy as np
import pytest
from areal_lite.api.image_span import ImageSpan, images_between, keyed_ids
from areal_lite.api.trajectory import TokenSequence


def span(offset: int, length: int) -> ImageSpan:
    return ImageSpan(offset, length, "a" * 64, (1, 2, 2 * length))


def sequence(*images: ImageSpan, trained: tuple[int, ...] = (7,)) -> TokenSequence:
    mask = np.zeros(8, np.bool_)
    mask[list(trained)] = True
    return TokenSequence(input_ids=np.arange(8), loss_mask=mask, images=images)


def test_a_sequence_takes_spans_that_are_sorted_apart_and_inside() -> None:
    assert sequence(span(1, 2), span(3, 4)).images[1].end == 7


@pytest.mark.parametrize(
    "images", [(span(3, 2), span(1, 2)), (span(1, 3), span(3, 2)), (span(6, 3),), (span(2, 0),), (span(-1, 2),)]
)
def test_other_spans_are_refused(images: tuple[ImageSpan, ...]) -> None:
    with pytest.raises(ValueError, match="sorted, apart, not empty, and inside"):
        sequence(*images)


def test_tokens_of_an_image_do_not_train() -> None:
    with pytest.raises(ValueError, match="inside image 0"):
        sequence(span(5, 3), trained=(7,))


def test_a_cut_takes_whole_images_with_offsets_from_its_start() -> None:
    images = (span(1, 2), span(4, 2))
    assert images_between(images, 3, 8) == (span(1, 2),)
    assert images_between(images, 0, 3) == (span(1, 2),)
    with pytest.raises(ValueError, match="cut the image"):
        images_between(images, 0, 5)
    with pytest.raises(ValueError, match="cut the image"):
        images_between(images, 2, 8)


def test_keyed_ids_differ_where_pictures_do_and_only_there() -> None:
    ids = [5, 9, 9, 9, 5, 9]
    one, other = (ImageSpan(1, 3, digit * 64, (1, 2, 6)) for digit in "ab")
    keys = keyed_ids(ids, [one])
    assert keys == keyed_ids(ids, [one])
    assert (keys[0], keys[4:]) == (5, [5, 9])  # what is no image stays, also a sampled placeholder
    assert len({*keys[1:4], *keyed_ids(ids, [other])[1:4]}) == 6
    assert max(keys[1:4]) < 0
    assert min(keyed_ids(ids, [one._replace(sha256="f" * 64)])) >= -(2**63)
