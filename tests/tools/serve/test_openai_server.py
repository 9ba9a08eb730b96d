"""The embedded server behind ``areal-lite serve`` answers OpenAI's two APIs with its own model."""

from __future__ import annotations
import asyncio
import functools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
import aiohttp
import openai
import pytest
from transformers import AutoTokenizer
from areal_lite.cli.commands import parse
from areal_lite.config.server_config import EmbeddedServerConfig
from areal_lite.embedded.startup import build, listening
from areal_lite.errors import ConfigError
from areal_lite.servers.programs.server_program import ServedModel
from areal_lite.tools.serve import serve
from areal_lite.tools.serve.openai_server import add_routes
from tests.embedded.serving import Client, load, logprobs_of, worst
from tests.fixtures.tiny_model import build_tiny_model

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
ADD: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "additionalProperties": False}}}
]


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


@asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[openai.AsyncOpenAI, Client]]:
    """Yield OpenAI's client and one of SGLang's dialect."""
    server = build(
        EmbeddedServerConfig(dtype="float32", device="cpu", num_threads=1), model, ServedModel(model_path=str(model))
    )
    async with (
        listening(server, host="127.0.0.1", port=0, extend=add_routes) as port,
        aiohttp.ClientSession(f"http://127.0.0.1:{port}", headers={"Content-Type": "application/json"}) as session,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client, Client(session, server.model.scheduler, f"127.0.0.1:{port}")


@pytest.mark.parametrize(("options", "spins"), [([], "10000"), (["--replicas=2"], None)])
def test_only_a_server_alone_on_its_cores_spins_for_a_moment(
    tiny_model: Path, options: list[str], spins: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*_: Any, **__: Any) -> Any:
        raise InterruptedError(os.environ.get("GOMP_SPINCOUNT"))

    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setattr(serve, "make_servers", started)
    with pytest.raises(InterruptedError, match=f"^{spins}$"):
        serve.run(parse(["serve", str(tiny_model), "--device=cpu", *options]))
    os.environ.pop("GOMP_SPINCOUNT", None)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--backend=vllm", "--deterministic"],
            "--deterministic is of the embedded server: give vllm its own flag by --args",
        ),
        (["--ray-address=h:1"], "--ray-address and --gpus-per-node need --launch ray"),
        (["--gpus-per-node=2"], "need --launch ray"),
    ],
)
def test_options_without_an_effect_are_refused(tiny_model: Path, options: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        serve.run(parse(["serve", str(tiny_model), *options]))


@in_loop
async def test_a_chat_completion_is_the_models_greedy_answer_with_its_logprobs(tiny_model: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_model), load(tiny_model)
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"]
    async with served(tiny_model) as (client, dialect):
        own = await dialect.generate(prompt, max_new_tokens=8)
        chat = await client.chat.completions.create(
            model="any", messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=2
        )
    (choice,) = chat.choices
    assert choice.message.content == tokenizer.decode(own["output_ids"], skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(prompt), 8)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    logprobs = [token.logprob for token in choice.logprobs.content]
    assert worst(logprobs, logprobs_of(model, prompt, own["output_ids"])) < 1e-4
    assert [token.top_logprobs[0].logprob for token in choice.logprobs.content] == logprobs


@in_loop
async def test_an_answer_that_fills_the_context_is_said_once(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    endless = {str(token): -100.0 for token in range(3)}  # special tokens, some of which end an answer
    said = []
    async with served(tiny_model) as (client, _):
        for max_tokens in (20, 999, 999):
            answer = await client.completions.create(
                model="any", prompt="hello!", max_tokens=max_tokens, extra_body={"logit_bias": endless}
            )
            assert answer.choices[0].finish_reason == "length"
            said.append(sum("filled the window of 256 tokens" in line for line in caplog.messages))
    assert said == [0, 1, 1]


@in_loop
async def test_a_stream_has_the_text_of_the_whole_answer_and_usage(tiny_model: Path) -> None:
    async with served(tiny_model) as (client, _):
        ask = partial(client.chat.completions.create, model="any", messages=HELLO, max_tokens=12, seed=3)
        whole = await ask()
        stream = await ask(stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


@in_loop
async def test_completions_take_text_or_ids_and_stop_at_a_text(tiny_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    async with served(tiny_model) as (client, _):
        ask = partial(client.completions.create, model="any", max_tokens=16, temperature=0)
        text = (await ask(prompt="abc")).choices[0].text
        ids = await ask(prompt=tokenizer.encode("abc"), logprobs=1)
        stopped = await ask(prompt="abc", stop=text[3:5])
        streamed = [chunk.choices[0].text async for chunk in await ask(prompt="abc", stream=True)]
        several = await ask(prompt="abc", n=2, temperature=1, seed=1)
    assert ids.choices[0].text == "".join(streamed) == text
    assert ids.choices[0].logprobs is not None and len(ids.choices[0].logprobs.token_logprobs or []) == 16
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (text[: text.index(text[3:5])], "stop")
    assert len({choice.text for choice in several.choices}) == 2


@in_loop
async def test_tools_are_seen_also_with_a_template_that_leaves_them_out_and_a_forced_call_is_one(
    tmp_path: Path,
) -> None:
    model = build_tiny_model(tmp_path / "long", context=2048)
    async with served(model) as (client, _):
        ask = partial(client.chat.completions.create, model="any", messages=HELLO, temperature=0, seed=1)
        answer = await ask(tools=ADD, tool_choice="required", max_tokens=400)
        without = await ask(max_tokens=1)
    assert answer.usage is not None and without.usage is not None
    assert answer.usage.prompt_tokens > without.usage.prompt_tokens + 100
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls", choice
    assert choice.message.tool_calls is not None
    assert [call.function.name for call in choice.message.tool_calls if call.type == "function"] == ["add"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": []}, "messages is"),
        ({"max_tokens": 999, "prompt": "x" * 300}, "unknown field 'prompt'"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "leaves no room for an answer"),
        ({"logit_bias": {"9999": 1}}, "9999"),
    ],
)
@in_loop
async def test_an_invalid_request_is_openais_error(tiny_model: Path, fields: dict[str, Any], message: str) -> None:
    async with served(tiny_model) as (_, dialect):
        status, reply = await dialect.call("/v1/chat/completions", {"messages": HELLO, **fields})
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
        assert message in reply["error"]["message"]
        status, reply = await dialect.call("/v1/chat/completions", None)
        assert status == 405


@in_loop
async def test_a_client_that_leaves_frees_the_model(tiny_model: Path) -> None:
    async with served(tiny_model) as (client, dialect):
        stream = await client.completions.create(
            model="any", prompt="a", stream=True, max_tokens=250, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        await stream.close()
        status, _ = await dialect.call("/v1/completions", {"prompt": "a", "max_tokens": 1})
        assert status == 200
        while dialect.scheduler.running:
            await dialect.call("/server_info")


@in_loop
async def test_a_request_that_a_weight_update_aborts_is_refused(tiny_model: Path) -> None:
    async with served(tiny_model) as (client, dialect):
        dialect.pace()
        stream = await client.completions.create(
            model="any", prompt="a", stream=True, max_tokens=250, extra_body={"ignore_eos": True}
        )
        chunks = aiter(stream)
        await anext(chunks)
        await dialect.call("/pause_generation", {"mode": "abort"})
        with pytest.raises(openai.APIError, match="send the request again"):
            while True:
                await anext(chunks)


@in_loop
async def test_a_failure_of_the_server_is_not_the_requests(tiny_model: Path) -> None:
    async with served(tiny_model) as (client, dialect):

        def broken(*_: Any) -> None:
            raise FloatingPointError("its weights are NaN")

        dialect.scheduler._extend = broken  # type: ignore[method-assign]
        with pytest.raises(openai.InternalServerError, match="NaN"):
            await client.completions.create(model="any", prompt="a", max_tokens=3)


@pytest.fixture
def base(tiny_model: Path, tmp_path: Path) -> Path:
    """Return the model without its chat template."""
    folder = shutil.copytree(tiny_model, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template.jinja"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": None}))
    return folder


@in_loop
async def test_a_model_without_a_chat_template_completes_prompts(base: Path) -> None:
    async with served(base) as (client, _):
        assert (await client.completions.create(model="any", prompt="a", max_tokens=4)).usage
        with pytest.raises(openai.BadRequestError, match="no chat template: send a prompt to /v1/completions"):
            await client.chat.completions.create(model="any", messages=HELLO)
