"""Positions of text, images and videos, against the models' own."""

from __future__ import annotations
import math
from types import MethodType, SimpleNamespace
from typing import Any
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.api.image_span import ImageSpan
from areal_lite.data.vision.rope_positions import (
    IMAGE,
    TEXT,
    VIDEO,
    mrope_positions,
    multimodal_position_ids,
    positions_of_spans,
)
from areal_lite.errors import ConfigError

IMAGE_ID, VIDEO_ID, START_ID, END_ID = 90, 91, 92, 93
TOKENS_PER_SECOND = 3


def own_model(name: str) -> Any:
    """The transformers model that defines the rule; only its config matters."""
    import transformers

    text = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "vocab_size": 100,
    }
    vision: dict[str, Any] = {"depth": 1, "num_heads": 1, "spatial_merge_size": 2, "patch_size": 4}
    config: Any
    if name == "Qwen2VL":
        config = transformers.Qwen2VLConfig(
            text_config=text, vision_config={**vision, "embed_dim": 8, "hidden_size": 8}
        )
    elif name == "Qwen2_5_VL":
        vision |= {"hidden_size": 8, "out_hidden_size": 8, "tokens_per_second": TOKENS_PER_SECOND}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    elif name == "Qwen3VL":
        vision |= {"hidden_size": 8, "out_hidden_size": 8, "deepstack_visual_indexes": [0]}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision)
    else:
        vision |= {"hidden_size": 8, "out_hidden_size": 8, "intermediate_size": 8}
        config = transformers.Glm4vConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        return getattr(transformers, f"{name}Model")(config)


def processor_of(name: str) -> Any:
    """The parts of a processor that the rule reads: class name, ids, merge size."""
    kind = type("Glm4vProcessor" if name == "Glm4v" else f"{name}Processor", (SimpleNamespace,), {})
    ids = {"image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID}
    if name == "Glm4v":
        ids |= {"video_start_id": START_ID, "video_end_id": END_ID}
    return kind(**ids, image_processor=SimpleNamespace(merge_size=2))


Media = tuple[str, tuple[int, int, int]]


def sequence(media: list[Media], *, model: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """``([T] ids, [T] kinds, grids)`` with text of growing length before, between and after."""
    ids: list[int] = [1]
    kinds: list[int] = [TEXT]

    def put(token: int, kind: int, count: int) -> None:
        ids.extend([token] * count)
        kinds.extend([kind] * count)

    for number, (what, (t, h, w)) in enumerate(media):
        put(2, TEXT, number + 1)
        if what == "image":
            put(IMAGE_ID, IMAGE, t * h * w // 4)
        elif model in ("Glm4v", "Qwen3VL"):
            if model == "Glm4v":
                put(START_ID, TEXT, 1)
            for _ in range(t):
                put(IMAGE_ID if model == "Glm4v" else VIDEO_ID, VIDEO, h * w // 4)
                put(3, TEXT, 2)  # the frame's time
            if model == "Glm4v":
                put(END_ID, TEXT, 1)
        else:
            put(VIDEO_ID, VIDEO, t * h * w // 4)
        put(4, TEXT, 1)
    inputs = {
        f"{kind}_grid_thw": torch.tensor([grid for what, grid in media if what == kind])
        for kind in ("image", "video")
        if any(what == kind for what, _ in media)
    }
    return torch.tensor(ids), torch.tensor(kinds), inputs


CASES: dict[str, list[Media]] = {
    "text only": [],
    "one image": [("image", (1, 4, 6))],
    "several images": [("image", (1, 4, 6)), ("image", (1, 8, 2)), ("image", (1, 2, 2))],
    "a video": [("video", (3, 4, 6))],
    "videos and images": [("video", (2, 4, 2)), ("image", (1, 6, 4)), ("video", (4, 2, 2))],
}


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Glm4v"])
def test_positions_equal_those_of_the_model(model: str, case: str, padding: str) -> None:
    """V13."""
    ids, kinds, inputs = sequence(CASES[case], model=model)
    mask = torch.ones_like(ids)
    if padding != "none":
        pad = (3, 0) if padding == "left" else (0, 3)
        ids, kinds, mask = (torch.nn.functional.pad(row, pad) for row in (ids, kinds, mask))
    if model == "Qwen2_5_VL" and "video_grid_thw" in inputs:
        inputs["second_per_grid_ts"] = torch.linspace(0.3, 1.7, len(inputs["video_grid_thw"]))

    expected, _ = own_model(model).get_rope_index(
        ids[None], mm_token_type_ids=kinds[None], attention_mask=mask[None], **inputs
    )
    positions = multimodal_position_ids(processor_of(model), ids, mask, inputs, tokens_per_second=TOKENS_PER_SECOND)

    assert positions is not None
    assert positions.shape == (4, len(ids))
    assert torch.equal(positions[1:], expected[:, 0])
    assert torch.equal(positions[0], (mask.cumsum(0) - 1).clamp(min=0))


def test_the_worked_example_of_the_docstring() -> None:
    kinds = torch.tensor([TEXT] * 2 + [IMAGE] * 6 + [TEXT])
    positions = mrope_positions(kinds, image_grids=torch.tensor([[1, 4, 6]]), video_grids=None, merge_size=2)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]


def test_video_positions_follow_seconds_if_known() -> None:
    kinds = torch.tensor([VIDEO] * 3)
    positions = mrope_positions(
        kinds, image_grids=None, video_grids=torch.tensor([[3, 2, 2]]), merge_size=2, video_intervals=[2.5]
    )
    assert positions[0].tolist() == [0, 2, 5]


def test_a_second_of_video_is_two_positions_by_default() -> None:
    """As in the published Qwen2.5-VL models."""
    inputs = {"video_grid_thw": torch.tensor([[3, 2, 2]]), "second_per_grid_ts": torch.tensor([1.5])}
    ids = torch.full((3,), VIDEO_ID)
    positions = multimodal_position_ids(processor_of("Qwen2_5_VL"), ids, torch.ones_like(ids), inputs)
    assert positions is not None
    assert positions[1].tolist() == [0, 3, 6]


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 3)),
        max_size=4,
    )
)
def test_each_token_gets_one_position_and_text_starts_after_all_rows_and_columns(
    media: list[tuple[bool, int, int, int, int]],
) -> None:
    kinds: list[int] = []
    grids: dict[int, list[list[int]]] = {IMAGE: [], VIDEO: []}
    expected_end = 0
    for is_video, frames, rows, columns, text in media:
        frames = frames if is_video else 1
        kind = VIDEO if is_video else IMAGE
        kinds += [kind] * (frames * rows * columns) + [TEXT] * text
        grids[kind].append([frames, 2 * rows, 2 * columns])
        expected_end += max(rows, columns) + text
    kinds.append(TEXT)
    positions = mrope_positions(
        torch.tensor(kinds),
        image_grids=torch.tensor(grids[IMAGE]),
        video_grids=torch.tensor(grids[VIDEO]),
        merge_size=2,
    )
    assert positions.shape == (3, len(kinds))
    assert positions[:, -1].tolist() == [expected_end] * 3


def test_a_video_that_uses_the_image_token_is_recognized_by_its_start_mark() -> None:
    ids = torch.tensor([IMAGE_ID, START_ID, IMAGE_ID, 5, IMAGE_ID, END_ID, IMAGE_ID])
    grids = {"image_grid_thw": torch.tensor([[1, 2, 2]] * 2), "video_grid_thw": torch.tensor([[2, 2, 2]])}
    positions = multimodal_position_ids(processor_of("Glm4v"), ids, torch.ones_like(ids), grids)
    assert positions is not None
    assert positions[1:].tolist() == [list(range(7))] * 3
    with pytest.raises(ValueError, match="1 more image tokens"):
        multimodal_position_ids(
            processor_of("Glm4v"), ids[2:], torch.ones(5), {"image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
        )


@pytest.mark.parametrize(
    ("count", "grids", "message"),
    [
        (5, [[1, 4, 6]], "image 0 has 5 tokens, but its grid .1, 4, 6. at merge size 2 needs 6"),
        (7, [[1, 4, 6]], "has 1 more image tokens than its image grids account for"),
        (6, [[1, 4, 6], [1, 2, 2]], "image 1 has 0 tokens, but its grid .1, 2, 2. at merge size 2 needs 1"),
    ],
)
def test_placeholders_that_do_not_match_the_grids_are_refused(count: int, grids: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mrope_positions(
            torch.tensor([TEXT] + [IMAGE] * count),
            image_grids=torch.tensor(grids),
            video_grids=None,
            merge_size=2,
        )


def test_plain_models_get_no_positions_and_unknown_grids_are_refused() -> None:
    ids = torch.tensor([1, 2])
    assert multimodal_position_ids(SimpleNamespace(), ids, torch.ones_like(ids), {}) is None
    with pytest.raises(ConfigError, match="SimpleNamespace gives grids"):
        multimodal_position_ids(SimpleNamespace(), ids, torch.ones_like(ids), {"image_grid_thw": torch.ones(1, 3)})


def test_positions_from_spans_are_those_of_transformers_in_any_layout() -> None:
    import transformers

    vision: dict[str, Any] = {"spatial_merge_size": 2, "tokens_per_second": 2}
    config = transformers.Qwen2_5_VLConfig(vision_config=vision)
    get_rope_index: Any = transformers.Qwen2_5_VLModel.get_rope_index
    model: Any = SimpleNamespace(config=config)
    model.get_vision_position_ids = MethodType(transformers.Qwen2_5_VLModel.get_vision_position_ids, model)
    rng = np.random.default_rng(0)
    for _ in range(200):
        spans, length = [], int(rng.integers(1, 6))
        for _ in range(rng.integers(0, 4)):
            grid = 1, 2 * int(rng.integers(1, 6)), 2 * int(rng.integers(1, 6))
            spans.append(ImageSpan(length, math.prod(grid) // 4, "a" * 64, grid))
            length = spans[-1].end + int(rng.integers(1, 6))
        ids, kinds = torch.zeros(1, length, dtype=torch.int64), torch.zeros(1, length, dtype=torch.int64)
        for span in spans:
            kinds[0, span.offset : span.end] = IMAGE
        grids = torch.tensor([span.grid for span in spans]) if spans else None
        expected, _ = get_rope_index(model, ids, kinds, image_grid_thw=grids)
        assert torch.equal(positions_of_spans(length, spans, merge_size=2), expected[:, 0])


def test_adjacent_images_have_their_own_positions() -> None:
    spans = [ImageSpan(1, 2, "a" * 64, (1, 2, 4)), ImageSpan(3, 1, "b" * 64, (1, 2, 2))]
    assert positions_of_spans(5, spans, merge_size=2).tolist() == [[0, 1, 1, 3, 4], [0, 1, 1, 3, 4], [0, 1, 2, 3, 4]]
    with pytest.raises(ValueError, match="needs 2"):
        positions_of_spans(3, [ImageSpan(1, 1, "a" * 64, (1, 2, 4))], merge_size=2)
