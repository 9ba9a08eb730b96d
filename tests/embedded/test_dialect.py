"""Replies have the same keys and errors as recordings of a real SGLang server."""

from __future__ import annotations
import asyncio
import io
import json
from pathlib import Path
from typing import Any
import pytest
from areal_lite.data.chat.tokenizer import load_tokenizer
from tests.embedded.serving import Client, reported, serving, worst

WIRE = Path(__file__).parent.parent / "fixtures" / "wire_sglang"
PROMPT = list(b"The capital of France is")


def sglang_reply(name: str) -> dict[str, Any]:
    """Return what a real SGLang server answered."""
    response: dict[str, Any] = json.loads((WIRE / f"{name}.json").read_text())["response"]
    return response


def shape(value: Any) -> Any:
    """Return the keys and list nesting of a JSON value; cached_tokens_details may be null, so its keys are left out."""
    if isinstance(value, dict):
        return {key: shape(entry) if key != "cached_tokens_details" else None for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], list | dict) else []
    return None


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("generate_basic", {"input_ids": PROMPT, "return_logprob": True}),
        ("generate_no_logprob", {"input_ids": PROMPT}),
        (
            "generate_greedy_top_logprobs_inputlp",
            {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": 2},
        ),
    ],
)
def test_a_reply_has_the_keys_of_sglang(tiny: Path, name: str, body: dict[str, Any]) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            params = {"max_new_tokens": 3, "ignore_eos": True} | body.get("sampling_params", {})
            status, reply = await client.call("/generate", body | {"sampling_params": params})
            assert status == 200
            theirs = sglang_reply(name)["body"]
            for scores in ("input_token_logprobs", "input_top_logprobs"):  # prompts are not scored here
                if scores in theirs["meta_info"]:
                    theirs["meta_info"][scores] = []
            assert shape(reply) == shape(theirs)

    asyncio.run(run())


BAD = [
    ("bad_unknown_param", {"sampling_params": {"nosuch": 1}}),
    ("bad_temperature", {"sampling_params": {"temperature": -1}}),
    ("bad_top_p", {"sampling_params": {"top_p": 1.5}}),
    ("bad_top_k", {"sampling_params": {"top_k": 0}}),
    ("bad_empty_input_ids", {"input_ids": []}),
    ("bad_no_input", {"input_ids": None}),
    ("bad_type", {"input_ids": "abc"}),
    ("bad_float_ids", {"input_ids": [1.5]}),
    ("generate_max_new_tokens_over_context", {"sampling_params": {"max_new_tokens": 5000}}),
    (None, {"input_ids": [259]}),
    (None, {"input_ids": [-1]}),
    (None, {"input_ids": [2**70]}),
    (None, {"input_ids": [True]}),
    (None, {"input_ids": [None]}),
    (None, {"input_ids": [[1], []]}),
    (None, {"input_ids": [[1], 2]}),
    (None, {"input_ids": [1, [2]]}),
    (None, {"input_ids": {"a": 1}}),
    (None, {"text": "both"}),
    (None, {"input_ids": None, "text": ""}),
    (None, {"input_ids": [5] * 257}),
    (None, {"rid": 5}),
    (None, {"rid": ["a"]}),
    (None, {"sampling_params": []}),
    (None, {"sampling_params": [{}]}),
    (None, {"sampling_params": {"max_new_tokens": -1}}),
    (None, {"sampling_params": {"max_new_tokens": 1.5}}),
    (None, {"sampling_params": {"max_new_tokens": "3"}}),
    (None, {"sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}),
    (None, {"sampling_params": {"temperature": "hot"}}),
    (None, {"sampling_params": {"top_k": 2.5}}),
    (None, {"sampling_params": {"min_p": 2}}),
    (None, {"sampling_params": {"stop": 3}}),
    (None, {"sampling_params": {"stop_token_ids": [999]}}),
    (None, {"sampling_params": {"stop_token_ids": 3}}),
    (None, {"sampling_params": {"ignore_eos": 1}}),
    (None, {"sampling_params": {"n": 2}}),
    (None, {"sampling_params": {"max_new_tokens": 0}}),
    (None, {"logprob_start_len": 0, "return_logprob": True}),
    (None, {"return_prompt_token_ids": True}),
    (None, {"sampling_params": {"sampling_seed": "x"}}),
    (None, {"sampling_params": {"stop_regex": "a+"}}),
    (None, {"sampling_params": {"structural_tag": "{}"}}),
    (None, {"sampling_params": {"repetition_penalty": 0}}),
    (None, {"sampling_params": {"presence_penalty": 3}}),
    (None, {"sampling_params": {"frequency_penalty": "x"}}),
    (None, {"sampling_params": {"logit_bias": [1]}}),
    (None, {"sampling_params": {"logit_bias": {"259": 1}}}),
    (None, {"sampling_params": {"logit_bias": {"a": 1}}}),
    (None, {"sampling_params": {"logit_bias": {"5": None}}}),
    (None, {"sampling_params": {"logit_bias": {"5": 1e39}}}),
    (None, {"sampling_params": {"logit_bias": {"5": -1e39}}}),
    (None, {"sampling_params": {"regex": "a+", "json_schema": "{}"}}),
    (None, {"sampling_params": {"regex": "a+("}}),
    (None, {"sampling_params": {"regex": 5}}),
    (None, {"sampling_params": {"ebnf": "root ::= nosuchrule"}}),
    (None, {"sampling_params": {"json_schema": "{"}}),
    (None, {"sampling_params": {"json_schema": '{"type": "nosuchtype"}'}}),
    (None, {"sampling_params": {"regex": "a+"}, "num_continued": 1}),
    (None, {"num_continued": -1}),
    (None, {"num_continued": 24}),
    (None, {"logprob_start_len": 99, "return_logprob": True}),
    (None, {"logprob_start_len": "0"}),
    (None, {"top_logprobs_num": -1}),
    (None, {"return_logprob": "yes"}),
    (None, {"stream": 1}),
    (None, {"lora_path": "nosuch"}),
]


def test_bad_input_gets_the_400_of_sglang_and_the_server_keeps_running(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            for name, broken in BAD:
                status, reply = await client.call("/generate", {"input_ids": PROMPT} | broken)
                assert status == 400, (broken, reply)
                if name is not None:
                    theirs = sglang_reply(name)
                    assert (status, shape(reply)) == (theirs["status"], shape(theirs["body"])), broken
            for raw in (b"{not json", b"", b"[]", b"3", b"\xff", b'"text"'):
                status, reply = await client.call("/generate", raw=raw)
                assert (status, shape(reply)) == (400, shape(sglang_reply("bad_json")["body"])), raw
            for path, raw in (
                ("/pause_generation", b'{"mode":"keep"}'),
                ("/pause_generation", b""),
                ("/continue_generation", b""),
                ("/update_weights_from_disk", b"{}"),
                ("/update_weights_from_disk", b'{"model_path":3}'),
                ("/update_weight_version", b"{}"),
                ("/abort_request", b"x"),
            ):
                assert (await client.call(path, raw=raw))[0] == 400, path
            assert (await client.call("/nosuch"))[0] == 404
            assert (await client.call("/get_load")) == (404, sglang_reply("get_load")["body"])
            assert (await client.call("/generate"))[0] == 405
            assert (await client.call("/generate", raw=io.BytesIO(b" " * (64 * 2**20 + 1))))[0] == 413
            await client.generate(PROMPT, max_new_tokens=1)

    asyncio.run(run())


def test_unsupported_options_are_accepted_at_their_default(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            params = {
                "max_new_tokens": 2,
                "top_k": 1 << 30,
                "stop": None,
                "regex": None,
                "frequency_penalty": 0.0,
            }
            body = {"input_ids": PROMPT, "nosuchfield": 3, "rid": None, "sampling_params": params}
            assert (await client.call("/generate", body))[0] == 200

    asyncio.run(run())


async def greedy_ids(client: Client, count: int) -> list[int]:
    """Return the first ids the model writes when nothing stops it."""
    ids: list[int] = (await client.generate(PROMPT, max_new_tokens=count, ignore_eos=True))["output_ids"]
    return ids


def test_stop_ids_stop_texts_and_eos(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            ids = await greedy_ids(client, 20)
            stop = ids[6]
            first = ids.index(stop) + 1
            reply = await client.generate(PROMPT, max_new_tokens=20, stop_token_ids=[stop])
            assert (reply["output_ids"], reply["meta_info"]["finish_reason"]) == (
                ids[:first],
                {"type": "stop", "matched": stop},
            )
            assert len(reported(reply)) == first
            kept = await client.generate(PROMPT, max_new_tokens=20, stop_token_ids=[stop], no_stop_trim=True)
            text = client.scheduler.decode(ids[:first], True)
            assert (reply["text"], kept["text"]) == (client.scheduler.decode(ids[: first - 1], True), text)

            ignored = await client.generate(PROMPT, max_new_tokens=20, ignore_eos=True, stop_token_ids=[stop])
            assert ignored["output_ids"] == ids
            banned = await client.generate(PROMPT, max_new_tokens=20, stop_token_ids=[stop], min_new_tokens=first + 2)
            assert stop not in banned["output_ids"][: first + 2]
            assert 2 not in banned["output_ids"][: first + 2]

    asyncio.run(run())


def test_a_stop_text_may_span_tokens_and_multibyte_characters(tiny: Path) -> None:
    """Every id of the tiny model is one byte, so 'né' is three ids."""

    async def run() -> None:
        async with serving(tiny) as client:
            write(client, tiny, "xné!")
            async with client.stream(PROMPT, temperature=0, max_new_tokens=9, stop=["zz", "né"]) as events:
                texts = [(event["text"], event["meta_info"]["finish_reason"]) async for event in events]
            assert texts[-1] == ("x", {"type": "stop", "matched": "né"})
            assert all("\ufffd" not in text for text, _ in texts)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("least", "text", "stop", "answer"),
    [(0, "xabca", "a", "x"), (5, "xabcdea!", "a", "xabcde"), (5, "xabca!", "a", "xabc"), (3, "xabab!", "ab", "xab")],
)
def test_a_stop_text_counts_from_the_minimum_on(tiny: Path, least: int, text: str, stop: str, answer: str) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            write(client, tiny, text)
            reply = await client.generate(PROMPT, max_new_tokens=9, min_new_tokens=least, stop=stop)
            assert (reply["text"], reply["meta_info"]["finish_reason"]) == (answer, {"type": "stop", "matched": stop})
            assert len(reply["output_ids"]) == len(answer + stop)

    asyncio.run(run())


def write(client: Client, tiny: Path, text: str) -> None:
    """Have the model sample this text, whatever it is asked."""
    script, extend = iter(load_tokenizer(str(tiny)).encode(text)), client.scheduler._extend

    def scripted(requests: Any, logits: Any) -> None:
        forced = logits.new_full(logits.shape, -1e9)
        forced[:, next(script)] = 0.0
        extend(requests, forced)

    client.scheduler._extend = scripted  # type: ignore[method-assign]


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-7])
def test_a_temperature_near_0_is_greedy(tiny: Path, temperature: float) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            greedy, near = [
                await client.generate(PROMPT, max_new_tokens=5, temperature=value) for value in (0, temperature)
            ]
            assert near["output_ids"] == greedy["output_ids"] and worst(reported(near), reported(greedy)) < 1e-5

    asyncio.run(run())


def test_a_stream_is_cumulative_and_ends_like_the_plain_reply(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny) as client:
            plain = await client.generate(PROMPT, max_new_tokens=200, ignore_eos=True)
            async with client.stream(PROMPT, temperature=0, max_new_tokens=200, ignore_eos=True) as stream:
                events = [event async for event in stream]
            theirs = [json.loads(line[6:]) for _, line in sglang_reply("stream_basic")["lines"] if "{" in line]
            assert shape(events[0]) == shape(theirs[0])
            theirs[-1]["meta_info"]["response_sent_to_client_ts"] = 0.0  # SGLang has it in the first event only
            assert shape(events[-1]) == shape(theirs[-1])
            for event in events:
                assert event["output_ids"] == plain["output_ids"][: len(event["output_ids"])]
                assert len(reported(event)) == len(event["output_ids"])
            assert (events[-1]["text"], events[-1]["output_ids"]) == (plain["text"], plain["output_ids"])
            assert [event["meta_info"]["finish_reason"] is not None for event in events].count(True) == 1
            async with client.stream([5] * 300, max_new_tokens=1) as stream:
                error = [event async for event in stream]
            assert shape(error[0]) == {"error": dict.fromkeys(("message", "type", "code", "retryable"))}

    asyncio.run(run())


def test_the_information_routes(tiny: Path) -> None:
    async def run() -> None:
        async with serving(tiny, weight_version="7", max_running_requests=3) as client:
            assert await client.call("/health") == (200, "")
            for path in ("/model_info", "/server_info"):
                info = (await client.call(path))[1]
                assert (info["model_path"], info["weight_version"]) == (str(tiny), "7")
                assert (info["context_length"], info["vocab_size"], info["max_running_requests"]) == (
                    256,
                    259,
                    3,
                )
            assert shape((await client.call("/v1/models"))[1]) == shape(sglang_reply("v1_models")["body"])
            assert (await client.call("/v1/loads"))[1]["loads"][0]["num_running_reqs"] == 0
            assert (await client.call("/flush_cache"))[1].startswith("Cache flushed.")

    asyncio.run(run())
