"""What the agents' service promises on any real server: episodes with the OpenAI SDK, through both doors."""

from __future__ import annotations
import asyncio
import functools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar
import pytest
import torch
from openai import AsyncOpenAI
from areal_lite.api import (
    EpisodeStatus,
    GenerationHyperparameters,
    ModelRequest,
    ModelResponse,
)
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.errors import ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from tests.real_servers.contract import EXACT, answers_of, distance
from tests.real_servers.real_server import Policy, RealServer, chosen, prompt

T = TypeVar("T")

STORY: Any = {"model": "default", "messages": [{"role": "user", "content": "Tell me a long story about a fox."}]}
LETTERS = 480
"""Characters of a long answer under a regex."""
LONG_REGEX = f"[a-z ]{{{LETTERS}}}"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]
YES_OR_NO = {
    "regex": {"regex": "(yes|no)"},
    "ebnf": {"ebnf": 'root ::= "yes" | "no"'},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
}


class Calls(Generic[T]):
    """An agent that makes the calls of a test."""

    def __init__(self, calls: Callable[[AsyncOpenAI], Awaitable[T]], *, by_address: bool) -> None:
        self._calls = calls
        self._by_address = by_address
        self.returned: list[T] = []

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        if self._by_address:
            del extra_kwargs["http_client"]
        async with AsyncOpenAI(**extra_kwargs) as client:
            self.returned.append(await self._calls(client))
        return 0.0


def converse(
    engine: RemoteInfEngine, calls: Callable[[AsyncOpenAI], Awaitable[T]], *, by_address: bool = False
) -> tuple[T, list[ModelResponse]]:
    """Run ``calls`` as an agent's episode of an evaluation; return their result and the recorded answers."""
    agent = Calls(calls, by_address=by_address)
    (group,) = engine.rollout_batch([{}], agent, group_size=1, is_eval=True)
    assert group.status is EpisodeStatus.ACCEPTED, group.error
    return agent.returned[0], answers_of(group.trajectories[0])


def completion(engine: RemoteInfEngine, **options: Any) -> tuple[Any, list[ModelResponse]]:
    """Return one chat completion and its recorded answers."""
    return converse(engine, lambda client: client.chat.completions.create(**{**STORY, "max_tokens": 64, **options}))


def contents(chunks: list[Any]) -> list[str]:
    """Return the pieces of text of a streamed chat completion."""
    return [text for chunk in chunks for choice in chunk.choices if (text := choice.delta.content)]


def is_letters(text: str, more: str) -> bool:
    """Whether ``more`` may follow under the long regex; "" asks for the end."""
    length = len(text) + len(more)
    return length <= LETTERS and only_letters(more) if more else length == LETTERS


@functools.cache
def only_letters(text: str) -> bool:
    return re.fullmatch("[a-z ]+", text) is not None


def is_yes_or_no(text: str, more: str) -> bool:
    return text in ("yes", "no") if not more else any(one.startswith(text + more) for one in ("yes", "no"))


class AgentContract:
    """Tests of the agents' service; each leaves the server on its starting weights."""

    backend: ClassVar[str]

    def text_of(self, server: RealServer, answer: ModelResponse) -> str:
        tokenizer: Any = load_tokenizer(str(server.model))
        text: str = tokenizer.decode(answer.output_tokens, skip_special_tokens=True)
        return text

    # -- streams -------------------------------------------------------------------------------

    @pytest.mark.parametrize("by_address", [False, True], ids=["in process", "by address"])
    def test_a_stream_has_every_token_of_the_recorded_answer(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy, by_address: bool
    ) -> None:
        async def calls(client: AsyncOpenAI) -> list[Any]:
            options = {**STORY, "max_tokens": 40, "temperature": 0.7, "logprobs": True}
            stream = await client.chat.completions.create(**options, stream=True, extra_body={"ignore_eos": True})
            return [chunk async for chunk in stream]

        chunks, (answer,) = converse(engine, calls, by_address=by_address)
        assert "".join(contents(chunks)) == self.text_of(server, answer).strip()
        assert len(contents(chunks)) > 20  # nearly a piece per token
        assert answer.output_len == 40
        ends = [choice.logprobs for chunk in chunks for choice in chunk.choices if choice.logprobs]
        assert [entry.logprob for end in ends for entry in end.content] == pytest.approx(answer.output_logprobs)
        assert distance(answer, policy.logprobs(answer, 0.7)) < EXACT

    def test_a_greedy_answer_is_the_same_streamed_and_whole(self, engine: RemoteInfEngine) -> None:
        async def calls(client: AsyncOpenAI) -> str:
            options = {**STORY, "max_tokens": 40, "temperature": 0.0}
            stream = await client.chat.completions.create(**options, stream=True)
            text = "".join(contents([chunk async for chunk in stream]))
            whole = await client.chat.completions.create(**options)
            assert whole.choices[0].message.content == text
            return text

        _, (streamed, whole) = converse(engine, calls)
        assert streamed.output_tokens == whole.output_tokens
        assert distance(streamed, torch.tensor(whole.output_logprobs)) < EXACT

    @pytest.mark.parametrize("by_address", [False, True], ids=["in process", "by address"])
    def test_a_client_that_hangs_up_ends_its_generation(
        self, engine: RemoteInfEngine, server: RealServer, by_address: bool
    ) -> None:
        async def calls(client: AsyncOpenAI) -> None:
            await server.until(busy=False)
            options = {**STORY, "max_tokens": 1000, "extra_body": {"ignore_eos": True}}
            stream = await client.chat.completions.create(**options, stream=True)
            await anext(aiter(stream))
            await server.until(busy=True)
            await stream.close()
            await server.until(busy=False)
            await client.chat.completions.create(**STORY, max_tokens=1)

        _, answers = converse(engine, calls, by_address=by_address)
        assert [answer.output_len for answer in answers] == [1]

    # -- what an answer must match ---------------------------------------------------------------

    def test_an_answer_follows_its_json_schema(self, engine: RemoteInfEngine) -> None:
        schema = {
            "type": "object",
            "properties": {"animal": {"enum": ["fox", "dog"]}, "tame": {"type": "boolean"}},
            "required": ["animal", "tame"],
            "additionalProperties": False,
        }
        response_format = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
        result, _ = completion(engine, response_format=response_format, temperature=0.7)
        answer = json.loads(result.choices[0].message.content)
        assert answer["animal"] in ("fox", "dog")
        assert answer["tame"] in (True, False)
        assert len(answer) == 2

    def test_a_json_object_is_one(self, engine: RemoteInfEngine) -> None:
        messages = [{"role": "user", "content": 'Answer with {"animal": "fox"} and nothing else.'}]
        result, _ = completion(engine, messages=messages, response_format={"type": "json_object"}, temperature=0.0)
        assert isinstance(json.loads(result.choices[0].message.content), dict)

    @pytest.mark.parametrize("kind", YES_OR_NO)
    def test_an_answer_follows_a_regex_or_a_grammar(self, engine: RemoteInfEngine, policy: Policy, kind: str) -> None:
        result, (answer,) = completion(engine, extra_body=YES_OR_NO[kind], temperature=1.0)
        assert result.choices[0].message.content in ("yes", "no")
        assert result.choices[0].finish_reason == "stop"
        assert distance(answer, policy.constrained_logprobs(answer, is_yes_or_no)) < EXACT

    def test_a_required_tool_is_called(self, engine: RemoteInfEngine) -> None:
        result, _ = completion(engine, tools=TOOLS, tool_choice="required", temperature=1.0)
        (call,) = result.choices[0].message.tool_calls
        assert result.choices[0].finish_reason == "tool_calls"
        assert call.function.name in ("weather", "population")
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

    def test_a_named_tool_is_called(self, engine: RemoteInfEngine) -> None:
        for name in ("weather", "population"):
            choice = {"type": "function", "function": {"name": name}}
            result, _ = completion(engine, tools=TOOLS, tool_choice=choice, temperature=1.0)
            (call,) = result.choices[0].message.tool_calls
            assert call.function.name == name

    # -- how an answer is sampled ------------------------------------------------------------------

    def test_two_choices_are_two_answers(self, engine: RemoteInfEngine, policy: Policy) -> None:
        result, answers = completion(engine, n=2, temperature=1.0, max_tokens=24)
        assert [choice.index for choice in result.choices] == [0, 1]
        assert len(answers) == 2
        assert answers[0].input_tokens == answers[1].input_tokens
        assert answers[0].output_tokens != answers[1].output_tokens
        assert result.usage.completion_tokens == sum(answer.output_len for answer in answers)
        for answer in answers:
            assert distance(answer, policy.logprobs(answer)) < EXACT

    def test_a_stop_string_ends_the_text_and_stays_in_the_tokens(
        self, engine: RemoteInfEngine, server: RealServer
    ) -> None:
        whole, (full,) = completion(engine, temperature=0.0, max_tokens=32)
        stop = self.text_of(server, full)[30:36]
        assert stop in whole.choices[0].message.content

        async def calls(client: AsyncOpenAI) -> list[Any]:
            stream = await client.chat.completions.create(
                **STORY, temperature=0.0, max_tokens=32, stop=[stop], stream=True
            )
            return [chunk async for chunk in stream]

        chunks, (answer,) = converse(engine, calls)
        expected = whole.choices[0].message.content.partition(stop)[0]
        assert "".join(contents(chunks)).rstrip() == expected.rstrip()
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert stop in self.text_of(server, answer)
        assert answer.output_tokens == full.output_tokens[: answer.output_len]

    def test_a_logit_bias_changes_the_logits(self, engine: RemoteInfEngine, policy: Policy) -> None:
        _, (free,) = completion(engine, temperature=0.0, max_tokens=1)
        banned, wanted = free.output_tokens[0], 1000
        bias = {str(banned): -100, str(wanted): 8}
        _, (answer,) = completion(engine, logit_bias=bias, temperature=0.7, max_tokens=24)
        assert banned not in answer.output_tokens
        logits = policy.answer_logits(answer)
        logits[:, banned] -= 100
        logits[:, wanted] += 8
        assert distance(answer, chosen(logits / 0.7, answer.output_tokens)) < EXACT

    def test_top_logprobs_are_the_likeliest_tokens(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy
    ) -> None:
        gconfig = GenerationHyperparameters(temperature=0.7, max_new_tokens=16)
        request = ModelRequest(input_ids=prompt(server.model), gconfig=gconfig, top_logprobs=5)
        answer = asyncio.run(engine.agenerate(request))
        logprobs = torch.log_softmax(policy.answer_logits(answer) / 0.7, dim=1)
        ids = torch.tensor([[token for token, _ in top] for top in answer.output_top_logprobs])
        reported = torch.tensor([[logprob for _, logprob in top] for top in answer.output_top_logprobs])
        assert all(len(set(row)) == 5 for row in ids.tolist())
        assert float((reported - logprobs.gather(1, ids)).abs().max()) < EXACT
        assert float((reported - logprobs.topk(5).values).abs().max()) < EXACT  # tokens may tie

        result, (answer,) = completion(engine, logprobs=True, top_logprobs=5, temperature=1.0, max_tokens=8)
        entries = result.choices[0].logprobs.content
        assert [entry.logprob for entry in entries] == pytest.approx(answer.output_logprobs)
        assert [len(entry.top_logprobs) for entry in entries] == [5] * answer.output_len

    def test_a_seed_repeats_an_answer(self, engine: RemoteInfEngine) -> None:
        seeds = (7, 7, 8)
        first, again, other = (completion(engine, seed=seed, temperature=1.0)[1][0] for seed in seeds)
        assert first.output_tokens != other.output_tokens
        assert first.output_tokens == again.output_tokens

    def test_min_tokens_holds_the_end_back(self, engine: RemoteInfEngine, server: RealServer, policy: Policy) -> None:
        options = {"messages": [{"role": "user", "content": "Say only: yes"}], "temperature": 0.0}
        _, (short,) = completion(engine, **options)
        end = load_tokenizer(str(server.model)).eos_token_id
        assert short.output_tokens[-1] == end
        at_least = short.output_len + 8
        _, (long,) = completion(engine, **options, extra_body={"min_tokens": at_least})
        assert long.output_len >= at_least
        assert end not in long.output_tokens[:at_least]
        logits = policy.answer_logits(long)
        logits[:at_least, end] = -torch.inf
        assert distance(long, chosen(logits, long.output_tokens)) < EXACT

    # -- weights and aborts in the middle ----------------------------------------------------------

    @pytest.mark.usefixtures("restored")
    def test_a_stream_continues_under_new_weights(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy, perturbed: Policy
    ) -> None:
        async def calls(client: AsyncOpenAI) -> list[Any]:
            chunks: list[Any] = []
            async with asyncio.TaskGroup() as tasks:
                stream = await client.chat.completions.create(
                    **STORY, max_tokens=100, temperature=1.0, extra_body={"ignore_eos": True}, stream=True
                )
                async for chunk in stream:
                    chunks.append(chunk)
                    if len(chunks) == 20:
                        tasks.create_task(engine.aupdate_weights_from_disk(str(perturbed.path), 1))
            return chunks

        chunks, (answer,) = converse(engine, calls)
        assert "".join(contents(chunks)) == self.text_of(server, answer).strip()
        assert answer.output_len == 100
        check_update(answer, policy.logprobs(answer), perturbed.logprobs(answer))

    @pytest.mark.usefixtures("restored")
    @pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
    def test_a_constrained_answer_continues_under_new_weights(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy, perturbed: Policy, streamed: bool
    ) -> None:
        request, received = long_answer(server, streamed=streamed, regex=LONG_REGEX)

        async def run() -> ModelResponse:
            async with asyncio.TaskGroup() as tasks:
                call = tasks.create_task(engine.agenerate(request))
                await under_way(server)
                await engine.aupdate_weights_from_disk(str(perturbed.path), 1)
            return call.result()

        answer = asyncio.run(run())
        assert re.fullmatch(LONG_REGEX, self.text_of(server, answer))
        assert answer.attempts == 1
        assert received == (answer.output_tokens if streamed else [])
        old, new = (weights.constrained_logprobs(answer, is_letters) for weights in (policy, perturbed))
        check_update(answer, old, new)

    def test_an_aborted_stream_continues_from_its_tokens(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy
    ) -> None:
        request, received = long_answer(server, streamed=True, ignore_eos=True, max_new_tokens=80)
        answer = asyncio.run(aborted_once(engine, server, request))
        assert answer.output_len == 80
        assert answer.attempts > 1
        assert received == answer.output_tokens
        assert distance(answer, policy.logprobs(answer)) < EXACT

    def test_an_aborted_constrained_answer_starts_again(
        self, engine: RemoteInfEngine, server: RealServer, policy: Policy
    ) -> None:
        request, _ = long_answer(server, streamed=False, regex=LONG_REGEX)
        answer = asyncio.run(aborted_once(engine, server, request))
        assert answer.attempts > 1
        assert re.fullmatch(LONG_REGEX, self.text_of(server, answer))
        assert distance(answer, policy.constrained_logprobs(answer, is_letters)) < EXACT

    def test_an_aborted_constrained_stream_fails(self, engine: RemoteInfEngine, server: RealServer) -> None:
        request, received = long_answer(server, streamed=True, regex=LONG_REGEX)
        with pytest.raises(ServerError, match="which it cannot continue"):
            asyncio.run(aborted_once(engine, server, request))
        assert received


def long_answer(server: RealServer, *, streamed: bool, **sampling: Any) -> tuple[ModelRequest, list[int]]:
    """Return a request, and the list that gets the tokens of its stream."""
    received: list[int] = []

    def on_tokens(ids: Sequence[int], _: Sequence[float]) -> None:
        received.extend(ids)

    return (
        ModelRequest(
            input_ids=prompt(server.model),
            gconfig=GenerationHyperparameters(**sampling),
            on_tokens=on_tokens if streamed else None,
        ),
        received,
    )


async def under_way(server: RealServer) -> None:
    """Return when the server has sampled some tokens of its only request."""
    await server.until(busy=True)
    await asyncio.sleep(1.5)


async def aborted_once(engine: RemoteInfEngine, server: RealServer, request: ModelRequest) -> ModelResponse:
    call = asyncio.ensure_future(engine.agenerate(request))
    await under_way(server)
    await server.abort_all()
    return await call


def check_update(answer: ModelResponse, old: torch.Tensor, new: torch.Tensor) -> None:
    """Check that the answer began with version 0, ended with version 1, and has the log-probs of both."""
    first_new = answer.output_versions.index(1)
    assert first_new > 0
    assert answer.output_versions == [0] * first_new + [1] * (answer.output_len - first_new)
    assert distance(answer, torch.cat([old[:first_new], new[first_new:]])) < EXACT
    assert (old - new).abs().max() > 0.1
