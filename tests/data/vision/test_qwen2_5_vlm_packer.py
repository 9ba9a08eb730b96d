"""Conversations with images, from the row to a forward pass of the real model."""

from __future__ import annotations
from typing import Any
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from areal_lite.config.dataset_config import DatasetConfig
from areal_lite.data.batch.data_proto import DataProto
from areal_lite.data.batch.training_batch import check_training_batch
from areal_lite.data.source.sample import Sample
from areal_lite.data.vision.qwen2_5_vlm_packer import Qwen2_5_VLM_DataPacker
from areal_lite.errors import ConfigError
from tests.fixtures.tiny_vlm import IMAGE_ID, VIDEO_ID, build_tiny_processor, build_tiny_vlm

TEXT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe this image.<|im_end|>\n"
    "<|im_start|>assistant\n"
)


def picture(size: tuple[int, int] = (24, 16), seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def conversation(*images: Any) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Describe this image."}]}]


@pytest.fixture(scope="module")
def processor() -> Any:
    return build_tiny_processor()


@pytest.fixture(scope="module")
def packer(processor: Any) -> Qwen2_5_VLM_DataPacker:
    packer = Qwen2_5_VLM_DataPacker()
    packer.setup(tokenizer=processor.tokenizer, processor=processor)
    return packer


@pytest.fixture(scope="module")
def model() -> Any:
    return build_tiny_vlm()


def recorded_sample(packer: Qwen2_5_VLM_DataPacker, row: Any, answer: str) -> Sample:
    """Return an engine's record: prompt ids with all tokens of its images, and the answer."""
    item = packer.get_rollout_input(row)
    text = item["prompt"]
    for image in item["multi_modal_data"]["image"]:
        text = text.replace("<|image_pad|>", "<|image_|>" * (image.width * image.height // 64), 1)
    sample = Sample(0, group_index=0, row=item)
    sample.append(packer.tokenizer(text.replace("<|image_|>", "<|image_pad|>"), add_special_tokens=False)["input_ids"])
    answer_ids = packer.tokenizer(answer, add_special_tokens=False)["input_ids"]
    sample.append(answer_ids, logprobs=[-1.0] * len(answer_ids), versions=[3] * len(answer_ids), sampled=True)
    sample.reward = 1.0
    return sample


def test_the_engine_gets_text_with_placeholders_and_the_images(packer: Qwen2_5_VLM_DataPacker) -> None:
    """D12."""
    image = picture()
    item = packer.get_rollout_input(conversation(image))
    assert item["prompt"] == TEXT
    assert list(item) == ["prompt", "multi_modal_data"]
    assert list(item["multi_modal_data"]) == ["image"]
    assert [np.array(own).tolist() for own in item["multi_modal_data"]["image"]] == [np.array(image).tolist()]


def test_a_dict_row_keeps_its_other_columns(processor: Any) -> None:
    packer = Qwen2_5_VLM_DataPacker()
    config = DatasetConfig(path="x", prompt_key="question", image_key="pictures")
    packer.setup(tokenizer=processor.tokenizer, processor=processor, config=config)
    row = {"question": "<image>Describe this image.", "pictures": [picture()], "answer": "noise"}
    item = packer.get_rollout_input(row)
    assert (item["question"], item["answer"]) == (TEXT, "noise")
    assert sorted(item) == ["answer", "multi_modal_data", "question"]
    assert isinstance(row["question"], str)
    assert "pictures" in row


def test_a_row_without_images_is_text(packer: Qwen2_5_VLM_DataPacker) -> None:
    item = packer.get_rollout_input(conversation())
    assert item["multi_modal_data"] == {}
    sample = packer.get_policy_input(conversation(), "A test.")
    assert sample.multi_modal_inputs is None


def test_the_engines_input_is_accepted_as_a_row(packer: Qwen2_5_VLM_DataPacker) -> None:
    """D12: both sides transform the same row."""
    row = conversation(picture())
    item = packer.get_rollout_input(row)
    assert packer.get_rollout_input(item) == item
    first, second = (packer.get_policy_input(source, "noise") for source in (row, item))
    assert first.input_ids.tolist() == second.input_ids.tolist()
    assert first.multi_modal_inputs is not None
    assert second.multi_modal_inputs is not None
    assert torch.equal(first.multi_modal_inputs["pixel_values"], second.multi_modal_inputs["pixel_values"])


def test_a_recorded_sequence_stays_as_it_is(packer: Qwen2_5_VLM_DataPacker) -> None:
    row = conversation(picture((24, 16)), picture((16, 8)))
    sample = recorded_sample(packer, row, "noise")
    trained = packer.get_policy_input(row, sample)
    assert trained.multi_modal_inputs is not None
    assert trained.multi_modal_inputs["image_grid_thw"].tolist() == [[1, 4, 6], [1, 2, 4]]
    assert sorted(trained.multi_modal_inputs) == ["image_grid_thw", "pixel_values"]
    assert trained.input_ids.tolist() == sample.tokens
    assert sample.tokens.count(IMAGE_ID) == 6 + 2
    assert trained.logprobs is not None
    assert trained.logprobs[trained.loss_mask].tolist() == [-1.0] * 5


@pytest.mark.parametrize("output", ["noise", list(b"noise")])
def test_ids_and_text_follow_the_expanded_prompt(packer: Qwen2_5_VLM_DataPacker, output: Any) -> None:
    row = conversation(picture())
    trained = packer.get_policy_input(row, output, n_ignore_prefix_tokens=2)
    assert np.count_nonzero(trained.input_ids == IMAGE_ID) == 6
    assert trained.num_trained_tokens == 3
    sample = Sample(prompt=row)
    sample.reward = 0.5
    same = packer.get_policy_input(sample, output)
    assert trained.input_ids.tolist() == same.input_ids.tolist()
    assert (trained.reward, same.reward) == (0.0, 0.5)


def test_tokens_that_do_not_fit_their_images_are_refused(packer: Qwen2_5_VLM_DataPacker) -> None:
    large, small = conversation(picture((24, 16))), conversation(picture((16, 8)))
    for row, answer, problem in (
        (large, "no<|image_pad|>se", "has 1 more image tokens than its image grids account for"),
        (small, "noise", "more image tokens"),
    ):
        trained = packer.get_policy_input(row, recorded_sample(packer, large, answer))
        with pytest.raises(ValueError, match=problem):
            packer.policy_collate_fn([trained], 99)


def test_a_packer_of_images_needs_a_processor(processor: Any) -> None:
    with pytest.raises(ConfigError, match="needs the model's processor"):
        Qwen2_5_VLM_DataPacker().setup(tokenizer=processor.tokenizer)


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """``[B, T]``: the log-prob of each token but the first, whose place holds 0."""
    scores = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(scores, (1, 0))


def concatenate_inputs(inputs: Any) -> dict[str, Tensor]:
    names = dict.fromkeys(name for row in inputs for name in row or ())
    return {name: torch.cat([row[name] for row in inputs if row and name in row]) for name in names}


FRAMES = [picture((16, 8), seed) for seed in range(4)]
VIDEO = [{"role": "user", "content": [{"type": "video", "video": FRAMES}, {"type": "text", "text": "?"}]}]


def test_log_probs_in_a_batch_equal_those_of_each_row_alone(packer: Qwen2_5_VLM_DataPacker, model: Any) -> None:
    """D7, V13: text, images and a video side by side, through the real model."""
    rows = [
        conversation(picture()),
        conversation(),
        conversation(picture((16, 8), 1), picture((8, 8), 2)),
        VIDEO,
    ]
    processed = [
        packer.get_policy_input(row, answer)
        for row, answer in zip(rows, ["noise", "nothing to see", "a", "it moves"], strict=True)
    ]
    length = packer.policy_compute_max_len(processed) + 3
    batch = packer.policy_collate_fn(processed, length)
    check_training_batch(DataProto.from_single_dict(dict(batch)))
    assert batch["position_ids"].shape == (4, 4, length)

    with torch.no_grad():
        logits = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            position_ids=batch["position_ids"].transpose(0, 1),
            **concatenate_inputs(batch["multi_modal_inputs"]),
        ).logits
        together = logprobs_of(logits, batch["input_ids"])
        for row, sample in enumerate(processed):
            ids = torch.from_numpy(sample.input_ids)[None]
            kinds = torch.zeros_like(ids).masked_fill(ids == IMAGE_ID, 1).masked_fill(ids == VIDEO_ID, 2)
            # Here the model places the tokens itself.
            inputs = dict(sample.multi_modal_inputs or {}, mm_token_type_ids=kinds)
            alone = logprobs_of(model(input_ids=ids, **inputs).logits, ids)
            mask = batch["loss_mask"][row]
            assert mask.sum() == sample.num_trained_tokens > 0
            torch.testing.assert_close(together[row][mask], alone[0][torch.from_numpy(sample.loss_mask)])
    loss = -together[batch["loss_mask"]].mean()
    assert torch.isfinite(loss)


def test_the_answers_log_probs_depend_on_the_image(packer: Qwen2_5_VLM_DataPacker, model: Any) -> None:
    scores = []
    for seed in (0, 1):
        batch = packer.policy_collate_fn([packer.get_policy_input(conversation(picture(seed=seed)), "noise")], 80)
        with torch.no_grad():
            logits = model(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                position_ids=batch["position_ids"].transpose(0, 1),
                **concatenate_inputs(batch["multi_modal_inputs"]),
            ).logits
        scores.append(logprobs_of(logits, batch["input_ids"])[batch["loss_mask"]])
    assert (scores[0] - scores[1]).abs().max() > 1e-3


def test_a_length_below_the_longest_sequence_and_an_empty_batch_are_refused(
    packer: Qwen2_5_VLM_DataPacker,
) -> None:
    sample = packer.get_policy_input(conversation(), "a")
    with pytest.raises(ValueError, match="computed_max_len is 1"):
        packer.policy_collate_fn([sample], 1)
    with pytest.raises(ValueError, match="there are no sequences"):
        packer.policy_compute_max_len([])
