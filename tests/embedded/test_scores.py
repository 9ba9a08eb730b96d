"""The log-probs of given tokens, which a teacher is asked for."""

from __future__ import annotations
import asyncio
import shutil
from pathlib import Path
from typing import Any
import pytest
import torch
from areal_lite.embedded import model_runner
from areal_lite.embedded.model_runner import ModelRunner
from areal_lite.servers.dialects.sglang import SGLang
from tests.embedded.serving import load, logprobs_of, serving, worst
from tests.fixtures.windowed_models import windowed_folder

DIALECT = SGLang(embedded=True)


def test_scores_equal_a_plain_forward_while_others_generate(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "_SCORED_ROWS", 7)
    ids = [3 + (7 * number) % 250 for number in range(60)]

    async def run() -> None:
        async with serving(tiny, context_length=100) as client:
            other = asyncio.create_task(client.generate(ids[:20], max_new_tokens=30, ignore_eos=True))
            status, reply = await client.call("/generate", DIALECT.score_body(ids, 0))
            assert status == 200 and reply["meta_info"]["completion_tokens"] == 0
            model = load(tiny)
            assert worst(DIALECT.parse_scores(reply, ids, 0), logprobs_of(model, ids[:1], ids[1:])) < 1e-4
            answer = await other
            expected = logprobs_of(model, ids[:20], answer["output_ids"], 0.0)
            assert worst([pair[0] for pair in answer["meta_info"]["output_token_logprobs"]], expected) < 1e-4
            status, reply = await client.call("/generate", DIALECT.score_body([5], 0))
            assert DIALECT.parse_scores(reply, [5], 0) == []

    asyncio.run(run())


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_prompts_in_turn_are_scored_after_their_starts_by_the_weights_of_now(
    tiny: Path, tmp_path: Path, family: str
) -> None:
    folder = tiny if family == "llama" else windowed_folder(tmp_path / "windowed", family, 8)
    one, other = ([3 + (step * number) % 250 for number in range(40)] for step in (7, 11))
    asked = [(one[:30] + tail, 29) for tail in ([9, 8, 7], [6, 5], [4] * 9)]  # a group
    asked += [(other, 29), (one, 29), (one, 20), (one, 38), (one, 39), (other, 1), (one, 0)]
    model, newer = load(folder), tmp_path / "newer"
    shutil.copytree(folder, newer)
    with torch.no_grad():
        for weight in (changed := load(folder)).parameters():
            weight.mul_(1.2)
    changed.save_pretrained(newer)

    async def run() -> None:
        async with serving(folder, context_length=100) as client:

            async def check(model: Any, ids: list[int], start: int) -> None:
                status, reply = await client.call("/generate", DIALECT.score_body(ids, start))
                expected = logprobs_of(model, ids[: start + 1], ids[start + 1 :])
                assert status == 200
                assert DIALECT.parse_scores(reply, ids, start) == pytest.approx(expected, abs=1e-4)

            for ids, start in [*asked, asked[0]]:
                await check(model, ids, start)
            update = {"model_path": str(newer), "weight_version": "1"}
            assert (await client.call("/update_weights_from_disk", update))[0] == 200
            await check(changed, *asked[1])  # of the group that was asked for last

    asyncio.run(run())


def test_a_groups_prompt_is_computed_once_unless_bits_or_images_matter(tiny: Path) -> None:
    def computed(**options: Any) -> list[int]:
        runner, widths = ModelRunner(load(tiny), slots=1, context_length=100, **options), list[int]()
        runner.model.get_input_embeddings().register_forward_hook(lambda *call: widths.append(call[1][0].shape[1]))
        for tail in ([9, 8, 7], [6, 5], [4]):
            runner.score([*range(3, 33), *tail], 29)
        runner.adapt(None)
        runner.score([*range(3, 33), 4], 29)
        return widths

    assert computed() == [29, 4, 3, 2, 29, 2]
    assert computed(exact=True) == computed(image_processor=object()) == [33, 32, 31, 31]


def test_scores_after_one_that_failed_half_way_are_right(tiny: Path) -> None:
    runner, ids = ModelRunner(load(tiny), slots=1, context_length=100), [*range(3, 43)]
    expected = logprobs_of(load(tiny), ids[:31], ids[31:])
    assert worst(runner.score(ids, 30), expected) < 1e-4

    def fail(*call: Any) -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        handle = runner.model.get_output_embeddings().register_forward_hook(fail)
        runner.score(ids, 30)
    handle.remove()
    assert worst(runner.score(ids, 30), expected) < 1e-4


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling_params": {"max_new_tokens": 1}}, "max_new_tokens 0 and temperature 1"),
        ({"sampling_params": {"max_new_tokens": 0, "temperature": 0.5}}, "max_new_tokens 0 and temperature 1"),
        ({"sampling_params": None}, "max_new_tokens 0 and temperature 1"),
        ({"input_ids": [5] * 41}, "maximum context length of 40"),
        ({"input_ids": [10**6]}, "not in the vocabulary"),
        ({"input_ids": []}, "must have at least 1 item"),
        ({"images": [{"x": 1}]}, "images cannot be scored: logprob_start_len takes input_ids alone"),
        ({"text": "both"}, "text cannot be scored"),
        ({"lora_path": "adapter"}, "is not loaded"),
        ({"logprob_start_len": 2}, "logprob_start_len is 2: it must be below the prompt's 2 tokens"),
        ({"logprob_start_len": True}, "logprob_start_len"),
    ],
)
def test_scores_that_cannot_be_given_are_refused(tiny: Path, changes: dict[str, Any], says: str) -> None:
    async def run() -> None:
        async with serving(tiny, context_length=40) as client:
            status, reply = await client.call("/generate", DIALECT.score_body([5, 6], 0) | changes)
            assert status == 400 and says in str(reply)

    asyncio.run(run())
