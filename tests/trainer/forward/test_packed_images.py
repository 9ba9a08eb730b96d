"""Images in packed sequences: the log-probs and gradients of transformers' own forward pass, in any layout."""

from __future__ import annotations
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from areal_lite.api.image_span import ImageSpan
from areal_lite.api.trajectory import TokenSequence
from areal_lite.errors import TrainingError
from areal_lite.models.fused_decoder import FusedDecoder
from areal_lite.models.parallel.ranks import Ranks
from areal_lite.models.policy_model import load_policy
from areal_lite.trainer.forward.logprobs import TokenScorer
from areal_lite.trainer.forward.microbatches import plan_blocks, tree_length
from areal_lite.trainer.forward.packed_images import PackedImages
from areal_lite.trainer.forward.packed_model import pack
from areal_lite.trainer.rl.step_tokens import StepCut
from tests.fixtures.tiny_vlm import IMAGE_ID, save_tiny_idefics3, save_tiny_vlm
from tests.fixtures.vision_sequences import Part, Pictures, save_tiny_qwen2_vl

CPU = torch.device("cpu")
BUILDERS: dict[str, Callable[..., Path]] = {
    "qwen2_vl": save_tiny_qwen2_vl,
    "qwen2_5_vl": save_tiny_vlm,
    "idefics3": save_tiny_idefics3,
}


@pytest.fixture(scope="module", params=BUILDERS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vlm(tmp_path_factory.mktemp("qwen"))


def scorer_of(folder: Path, pictures: Pictures, *, vision: Any = "train") -> TokenScorer:
    scorer = TokenScorer(load_policy(str(folder), device=CPU, vision=vision), temperature=1.0)
    scorer.pixels = pictures.pixels
    return scorer


def tree(pictures: Pictures) -> list[TokenSequence]:
    """Return a group with a shared image, another image at the same place, two images, a second turn, and text."""
    first, second, small = pictures.image(0), pictures.image(1), pictures.image(2, 16, 8)
    made: list[list[Part]] = [
        [10, 3, first, 4, 11, 12, 13],
        [10, 3, first, 4, 11, 12, 14, 15],
        [10, 3, first, 4, 11, 12, 14, 15, 3, small, 4, 20, 21],
        [10, 3, second, 4, 11, 12, 13],
        [10, 3, small, 4, 3, first, 4, 11, 30],
        [10, 11, IMAGE_ID, 12, 13],
    ]
    return [pictures.sequence(parts, 2, placeholder=IMAGE_ID, member=i) for i, parts in enumerate(made)]


def by_transformers(
    scorer: TokenScorer, pictures: Pictures, batch: Sequence[TokenSequence]
) -> tuple[Tensor, dict[str, Tensor]]:
    model = scorer.model
    return with_gradients(model, torch.cat([pictures.logprobs(model, one) for one in batch]))


def with_gradients(model: Any, logprobs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    weights = torch.linspace(0.5, 1.5, len(logprobs))
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    return logprobs.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def packed_logprobs(scorer: TokenScorer, batch: Sequence[TokenSequence], max_tokens: int) -> Tensor:
    cut = StepCut(batch, scorer, ranks=Ranks(), device=CPU)
    logprobs = torch.zeros(sum(one.num_trained_tokens for one in batch))
    for part in cut(range(len(batch)), max_tokens):
        logprobs = logprobs.index_add(0, part.tokens, scorer(part.packed).logprobs)
    return logprobs


@pytest.mark.parametrize(("how", "max_tokens"), [("tree", 1000), ("alone", 1), ("ragged", 1000), ("rows", 60)])
def test_log_probs_and_gradients_are_those_of_transformers(
    folder: Path, tmp_path: Path, how: str, max_tokens: int
) -> None:
    pictures = Pictures(folder, tmp_path)
    scorer, batch = scorer_of(folder, pictures), tree(pictures)
    expected, gradients = by_transformers(scorer, pictures, batch)
    assert how != "ragged" or scorer.read_ragged()
    scorer.shares_prefixes = how != "rows"

    found, own = with_gradients(scorer.model, packed_logprobs(scorer, batch, max_tokens))

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert own.keys() == gradients.keys()
    assert any("vis" in name for name in own)
    for name, gradient in gradients.items():
        near = 1e-3 * gradient.abs().max().item()
        torch.testing.assert_close(own[name], gradient, rtol=0, atol=max(near, 1e-6), msg=name)


def test_a_fused_decoder_reads_images_as_its_model_does(folder: Path, tmp_path: Path) -> None:
    pictures = Pictures(folder, tmp_path)
    scorer, batch = scorer_of(folder, pictures, vision="frozen"), tree(pictures)
    expected = torch.cat([pictures.logprobs(scorer.model, one) for one in batch])
    scorer._fused = (FusedDecoder(scorer._decoder[0], torch.float32),)

    with torch.autocast("cpu", torch.bfloat16):
        found = packed_logprobs(scorer, batch, 1000)

    assert (found - expected).abs().max() < 0.1  # the head is bfloat16
    assert (found - expected).abs().mean() < 0.02


def test_exact_attention_leaves_the_tower_as_it_is(folder: Path, tmp_path: Path) -> None:
    pictures = Pictures(folder, tmp_path)
    scorer, batch = scorer_of(folder, pictures), tree(pictures)
    expected = torch.cat([pictures.logprobs(scorer.model, one) for one in batch])
    assert scorer.read_exactly()
    torch.testing.assert_close(packed_logprobs(scorer, batch, 1000), expected, rtol=0, atol=1e-4)


def test_an_image_is_computed_once_in_a_micro_batch(qwen: Path, tmp_path: Path, monkeypatch: Any) -> None:
    pictures = Pictures(qwen, tmp_path)
    scorer, batch = scorer_of(qwen, pictures), tree(pictures)
    seen: list[int] = []
    scorer.model.model.visual.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(len(kwargs["grid_thw"])), with_kwargs=True
    )
    packed_logprobs(scorer, batch, 1000)
    assert seen == [3]


def test_two_images_never_share_a_branch(qwen: Path, tmp_path: Path) -> None:
    pictures = Pictures(qwen, tmp_path)
    batch = tree(pictures)
    one, other = batch[0], batch[3]
    assert one.input_ids.tolist() == other.input_ids.tolist()
    tokens = len(one) - 1
    assert tree_length([one, one], [0, 1]) == tokens
    assert tree_length([one, other], [0, 1]) == 2 * tokens - 2  # all from the image on


def test_micro_batches_count_the_tokens_of_images(qwen: Path, tmp_path: Path) -> None:
    pictures = Pictures(qwen, tmp_path)
    batch = [
        dataclasses.replace(pictures.sequence([9, pictures.image(i), 8], 1, placeholder=IMAGE_ID), group_id=str(i))
        for i in range(6)
    ]
    length = len(batch[0]) - 1
    scorer = scorer_of(qwen, pictures)
    parts = list(StepCut(batch, scorer, ranks=Ranks(), device=CPU)(range(6), 2 * length))
    assert [len(part.packed.input_ids) for part in parts] == [2 * length] * 3


def test_a_sampled_placeholder_is_text_and_trains(qwen: Path, tmp_path: Path) -> None:
    pictures = Pictures(qwen, tmp_path)
    image = pictures.image(0)
    scorer = scorer_of(qwen, pictures)
    batch = [pictures.sequence([9, image, 8, 7, IMAGE_ID], 2, placeholder=IMAGE_ID, member=0)]
    batch += [pictures.sequence([9, image, 8, IMAGE_ID, 7], 1, placeholder=IMAGE_ID, member=1)]
    found = packed_logprobs(scorer, batch, 1000)
    assert len(found) == 3
    # Without its last token the first one is plain for transformers, which takes every placeholder for an image.
    plain = pictures.sequence([9, image, 8, 7], 1, placeholder=IMAGE_ID)
    torch.testing.assert_close(found[0], pictures.logprobs(scorer.model, plain)[0], rtol=0, atol=1e-4)


def test_the_model_keeps_no_positions_of_an_earlier_batch(qwen: Path, tmp_path: Path) -> None:
    pictures = Pictures(qwen, tmp_path)
    scorer, batch = scorer_of(qwen, pictures), tree(pictures)
    text = [batch[-1]]
    before = packed_logprobs(scorer, text, 1000)
    pictures.logprobs(scorer.model, batch[2])  # transformers keeps this sequence's
    assert torch.equal(packed_logprobs(scorer, text, 1000), before)


def test_a_model_of_text_refuses_images(qwen: Path, tiny: Path, tmp_path: Path) -> None:
    pictures = Pictures(qwen, tmp_path)
    scorer = TokenScorer(load_policy(str(tiny), device=CPU), temperature=1.0)
    with pytest.raises(TrainingError, match="does not read"):
        packed_logprobs(scorer, tree(pictures)[:1], 1000)


def test_images_without_their_pixels_or_with_other_tokens_are_refused(qwen: Path, tmp_path: Path) -> None:
    pictures = Pictures(qwen, tmp_path)
    scorer, one = scorer_of(qwen, pictures), tree(pictures)[0]
    span = one.images[0]
    shorter = dataclasses.replace(one, images=(span._replace(length=span.length - 3, grid=(1, 2, span.grid[2])),))
    with pytest.raises(TrainingError, match="has 3 tokens in its sequence, and the Qwen2_5_VL.* makes 6"):
        packed_logprobs(scorer, [shorter], 1000)
    scorer.pixels = None
    with pytest.raises(TrainingError, match=r"given no pixels: set scorer\.pixels"):
        packed_logprobs(scorer, [one], 1000)
    blocks = [block for bundle in plan_blocks([one], [0], max_tokens=99, balance_length=99) for block in bundle]
    with pytest.raises(TrainingError, match="does not read"):
        pack([one], blocks, device=CPU)


@given(st.data())
def test_the_parts_of_a_micro_batch_have_its_images_at_its_places(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    images: Any = [(ImageSpan(0, length, str(index), (1, 2, 2 * length)), {}) for index, length in enumerate(lengths)]
    width = data.draw(st.integers(1, 12))
    rows = data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=width))
    at = data.draw(st.permutations(range(width)))[: len(rows)]
    whole = PackedImages(
        images, torch.tensor(at).long(), torch.tensor(rows).long(), torch.arange(3 * width).view(3, -1)
    )
    begin, end = sorted(data.draw(st.tuples(st.integers(0, width), st.integers(0, width))))
    part = whole.part(begin, end)

    def features(of: PackedImages) -> list[tuple[str, int]]:
        return [(span.sha256, row) for span, _ in of.images for row in range(span.length)]

    found = {
        place + begin: features(part)[row] for place, row in zip(part.at.tolist(), part.rows.tolist(), strict=True)
    }
    expected = {place: features(whole)[row] for place, row in zip(at, rows, strict=True) if begin <= place < end}
    assert found == expected
    assert {span.sha256 for span, _ in part.images} == {name for name, _ in expected.values()}
    assert part.axes is not None and whole.axes is not None
    assert torch.equal(part.axes, whole.axes[:, begin:end])
