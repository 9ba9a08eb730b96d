"""The log-probs of given tokens, which a teacher is asked for."""

from __future__ import annotations
import asyncio
from pathlib import Path
from typing import Any
import pytest
from areal_lite.embedded import model_runner
from areal_lite.servers.dialects.sglang import SGLang
from tests.embedded.serving import load, logprobs_of, serving, worst

DIALECT = SGLang(embedded=True)


def test_scores_equal_a_plain_forward_while_others_generate(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "_SCORED_ROWS", 7)
    ids = [3 + (7 * number) % 250 for number in range(60)]

    async def run() -> None:
        async with serving(tiny, context_length=100) as client:
            other = asyncio.create_task(client.generate(ids[:20], max_new_tokens=30, ignore_eos=True))
            status, reply = await client.call("/generate", DIALECT.score_body(ids))
            assert status == 200 and reply["meta_info"]["completion_tokens"] == 0
            model = load(tiny)
            assert worst(DIALECT.parse_scores(reply, ids), logprobs_of(model, ids[:1], ids[1:])) < 1e-4
            answer = await other
            expected = logprobs_of(model, ids[:20], answer["output_ids"], 0.0)
            assert worst([pair[0] for pair in answer["meta_info"]["output_token_logprobs"]], expected) < 1e-4
            status, reply = await client.call("/generate", DIALECT.score_body([5]))
            assert DIALECT.parse_scores(reply, [5]) == []

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sampling_params": {"max_new_tokens": 1}}, "max_new_tokens 0 and temperature 1"),
        ({"sampling_params": {"max_new_tokens": 0, "temperature": 0.5}}, "max_new_tokens 0 and temperature 1"),
        ({"sampling_params": None}, "max_new_tokens 0 and temperature 1"),
        ({"input_ids": [5] * 41}, "maximum context length of 40"),
        ({"input_ids": [10**6]}, "not in the vocabulary"),
        ({"input_ids": []}, "must have at least 1 item"),
        ({"lora_path": "adapter"}, "is not loaded"),
    ],
)
def test_scores_that_cannot_be_given_are_refused(tiny: Path, changes: dict[str, Any], says: str) -> None:
    async def run() -> None:
        async with serving(tiny, context_length=40) as client:
            status, reply = await client.call("/generate", DIALECT.score_body([5, 6]) | changes)
            assert status == 400 and says in str(reply)

    asyncio.run(run())
