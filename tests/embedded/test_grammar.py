"""Constrained answers satisfy their constraint, and their log-probs ignore it."""

from __future__ import annotations
import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any
import pytest
from areal_lite.embedded.bad_request import BadRequest
from areal_lite.embedded.grammar import GrammarCompiler
from areal_lite.embedded.sampling_params import SamplingParams
from tests.embedded.serving import Client, load, logprobs_of, reported, serving, worst

PROMPT = list(b"Describe the fox in JSON: ")
EOS = 2
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["mammal", "bird"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "legs", "kind", "tags"],
    "additionalProperties": False,
}


async def answers(client: Client, count: int, **params: Any) -> list[Any]:
    return await asyncio.gather(
        *(
            client.generate(PROMPT, max_new_tokens=200, temperature=1.0, sampling_seed=seed, **params)
            for seed in range(count)
        )
    )


def test_answers_of_a_random_model_are_valid_json_and_their_logprobs_those_of_a_plain_forward(
    tiny: Path,
) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            model, texts = load(tiny), set()
            for reply in await answers(client, 20, json_schema=json.dumps(SCHEMA)):
                value = json.loads(reply["text"])
                assert list(value) == ["name", "legs", "kind", "tags"]
                assert len(value["name"]) <= 8 and 0 <= value["legs"] <= 99 and type(value["legs"]) is int
                assert value["kind"] in ("mammal", "bird")
                _, _, after_name = json.dumps(value | {"name": "?"}).partition('"?"')
                assert reply["text"].endswith(after_name)  # no free white space
                assert len(value["tags"]) <= 3 and set(map(type, value["tags"])) <= {bool}
                assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
                assert worst(reported(reply), logprobs_of(model, PROMPT, reply["output_ids"])) < 1e-4
                texts.add(reply["text"])
            assert len(texts) == 20

    asyncio.run(run())


@pytest.mark.parametrize(
    ("params", "pattern"),
    [
        ({"regex": "[a-z]{2}-[0-9]{3,5}"}, r"[a-z]{2}-[0-9]{3,5}"),
        ({"ebnf": 'root ::= "yes" | "no" digit+\ndigit ::= [0-9]'}, r"yes|no[0-9]+"),
        ({"regex": "[ab]{4}", "ignore_eos": True}, r"[ab]{4}"),
        ({"regex": "[ab]{4}", "min_new_tokens": 9}, r"[ab]{4}"),
        ({"regex": "[ab]+", "min_new_tokens": 9}, r"[ab]{9,}"),
        ({"regex": "a*b", "logit_bias": {"98": -8.0}, "top_k": 5, "top_p": 0.9}, r"a*b"),
        ({"regex": "\u00e9+!"}, "\u00e9+!"),
    ],
)
def test_regexes_and_grammars_hold_for_the_whole_answer(tiny: Path, params: dict[str, Any], pattern: str) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            for reply in await answers(client, 6, **params):
                assert reply["meta_info"]["finish_reason"]["type"] == "stop"
                assert re.fullmatch(pattern, reply["text"]), reply["text"]

    asyncio.run(run())


def test_other_requests_in_the_batch_are_not_constrained(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            params = {"temperature": 1.0, "max_new_tokens": 30, "ignore_eos": True, "sampling_seed": 7}
            alone = await client.generate(PROMPT, **params)
            plain, *copies = await asyncio.gather(
                client.generate(PROMPT, **params),
                *(client.generate(PROMPT, regex="[0-9]+", **params | {"sampling_seed": seed}) for seed in range(3)),
            )
            assert plain["output_ids"] == alone["output_ids"]
            assert all(copy["text"].isdigit() for copy in copies)
            assert len({copy["text"] for copy in copies}) == 3

    asyncio.run(run())


def test_greedy_decoding_takes_the_best_allowed_token(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            reply = await client.generate(PROMPT, regex="[xyz]", max_new_tokens=1)
            best = max(b"xyz", key=lambda byte: logprobs_of(load(tiny), PROMPT, [id_of(client, byte)], 0.0)[0])
            assert reply["text"] == chr(best)

    def id_of(client: Client, byte: int) -> int:
        return next(i for i in range(259) if client.scheduler.decode([i], True) == chr(byte))

    asyncio.run(run())


def test_without_the_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    compiler = GrammarCompiler(None, vocab_size=10, eos_ids=frozenset({2}))
    assert compiler.grammar(SamplingParams()) is None
    with pytest.raises(BadRequest, match="regex needs llguidance on the server: pip install llguidance"):
        compiler.grammar(SamplingParams(regex="a"))
