"""The engine client against a real HTTP server: one retry loop, exact tokens, versions from the server."""

from __future__ import annotations
import asyncio
import itertools
import json
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
import pytest
from hypothesis import given
from hypothesis import strategies as st
from areal_lite.api import (
    GenerationHyperparameters,
    InferenceEngineConfig,
    ModelRequest,
    ModelResponse,
    episode_context,
)
from areal_lite.api.episode_context import Episode, EpisodeContext
from areal_lite.api.io_struct import TokenPrefix
from areal_lite.errors import ConfigError, ServerError
from areal_lite.rollout.remote_inf_engine import RemoteInfEngine
from areal_lite.servers.client.server_requests import ServerRequests
from areal_lite.servers.dialects import Dialect
from areal_lite.servers.dialects.dialect import BadResponse, ServerInfo
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM
from areal_lite.servers.pool.server_pool import Server, ServerPool
from tests.fixtures.engines import generation_call
from tests.rollout.scripted import OneTurn, TwoTurns, until
from tests.stub_server import StubThread, answer_tokens

StartStub = Callable[..., StubThread]
StartEngine = Callable[..., RemoteInfEngine]


def generate(engine: RemoteInfEngine, ids: list[int] | None = None, **sampling: Any) -> ModelResponse:
    request = ModelRequest(input_ids=ids or [1, 2, 3], gconfig=GenerationHyperparameters(**sampling))
    return asyncio.run(engine.agenerate(request))


def test_ids_logprobs_and_versions_are_what_the_server_sent(start_stub: StartStub, start_engine: StartEngine) -> None:
    response = generate(start_engine(start_stub(answer_len=4)))
    assert response.output_tokens == answer_tokens([1, 2, 3], 0, 4)
    assert response.output_logprobs == [-0.5 - i / 64 for i in range(4)]
    assert response.output_versions == [0, 0, 0, 0]
    assert (response.stop_reason, response.input_len, response.output_len) == ("stop", 3, 4)


@pytest.mark.parametrize("given", [True, False])
def test_the_records_of_a_conversation_share_its_prompts(
    start_stub: StartStub, start_engine: StartEngine, given: bool
) -> None:
    """Whether the prompts are ``given`` as extensions of one another, or only are."""
    engine, episode = start_engine(start_stub()), Episode()

    async def play() -> list[list[int]]:
        episode_context.enter(EpisodeContext(episode=episode))
        prompts, prefix = [], TokenPrefix([1, 2, 3], 3)
        for turn in range(3):
            prompts.append(prefix.tolist())
            response = await engine.agenerate(ModelRequest(input_ids=prompts[-1], prefix=prefix if given else None))
            assert response.output_tokens == answer_tokens(prompts[-1], 0, 8)
            prefix = prefix.extended([*response.output_tokens, turn])
        beyond = prefix.extended([-5])
        with pytest.raises(ConfigError, match="input_ids holds -5"):
            await engine.agenerate(ModelRequest(input_ids=beyond.tolist(), prefix=beyond if given else None))
        return prompts

    prompts = asyncio.run(play())
    assert [call.input_tokens for call in episode.calls] == prompts
    assert [call.input_len for call in episode.calls] == list(map(len, prompts))
    assert len({id(call.prompt.ids) for call in episode.calls}) == 1


def test_branches_of_a_conversation_keep_their_own_prompts(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine, episode = start_engine(start_stub(answer_len=2)), Episode()

    async def play() -> list[list[int]]:
        episode_context.enter(EpisodeContext(episode=episode))
        first = await engine.agenerate(ModelRequest(input_ids=[1, 2, 3]))
        after = first.input_tokens + first.output_tokens
        prompts = [[1, 2, 3], [*after, 5], [*after, 6], [*after, 5, 7], [1, 2, 4]]
        for prompt in prompts[1:]:
            response = await engine.agenerate(ModelRequest(input_ids=prompt))
            prompt.append(99)  # the caller's list is the caller's
            response.input_tokens.append(98)
        return prompts

    prompts = asyncio.run(play())
    assert [call.input_tokens for call in episode.calls] == [prompts[0], *(prompt[:-1] for prompt in prompts[1:])]


@pytest.mark.parametrize("fault", ["500", "429", "reset", "garbage", "lengths", "nan", "negative"])
def test_a_passing_fault_is_retried_and_leaves_no_trace(
    start_stub: StartStub, start_engine: StartEngine, fault: str
) -> None:
    stub = start_stub(fault=lambda n: fault if n == 0 else None)
    response = generate(start_engine(stub))
    assert stub.server.seen[f"fault {fault}"] == 1
    assert response.output_tokens == answer_tokens([1, 2, 3], 0, 8)
    assert response.attempts == 2


def test_requests_that_took_several_tries_are_counted(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub(fault={0: "500", 2: "500", 3: "500"}.get))
    assert [generate(engine).attempts for _ in range(3)] == [2, 3, 1]
    assert engine._client.counts()["retried_requests"] == 2


def test_a_probe_returns_the_greedy_answer_of_each_server_that_is_up(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stubs = [start_stub(), start_stub(fault={1: "500", 2: "abort"}.get)]
    engine = start_engine(*stubs)
    answer = answer_tokens([1, 2, 3], 0, 4), [-0.5 - i / 64 for i in range(4)]
    both = [(f"http://{stub.address}", *answer) for stub in stubs]
    assert engine.probe([1, 2, 3], 4) == both
    sampling = {"temperature": 0.0, "skip_special_tokens": True, "max_new_tokens": 4, "ignore_eos": True}
    (asked,) = stubs[0].server.requests
    assert asked["sampling_params"] == sampling and "top_logprobs_num" not in asked
    for failures in (1, 1):  # an error, then no token
        assert engine.probe([1, 2, 3], 4) == both[:1]
        assert engine._client.pool.servers[1].failed_requests == failures
    stubs[0].server.fault = stubs[1].server.fault = lambda number: "500"
    with pytest.raises(ServerError, match="no server answers: said HTTP 500: scheduled 500"):
        engine.probe([1, 2, 3], 4)


@pytest.mark.parametrize(("ids", "bad"), [([64], 64), ([3, 0, 70, -1], 70), ([0, -1, 64], -1), ([0, 63], None)])
def test_ids_outside_the_vocabulary_are_refused(
    start_stub: StartStub, start_engine: StartEngine, ids: list[int], bad: int | None
) -> None:
    stub = start_stub()
    stub.server.told |= {"vocab_size": 64}
    engine = start_engine(stub)
    if bad is None:
        assert generate(engine, ids).output_len == 8
        return
    with pytest.raises(ConfigError, match=f"input_ids holds {bad}: ids are .* below the vocabulary size 64;"):
        generate(engine, ids)


def test_the_smallest_answer_has_one_token(start_stub: StartStub, start_engine: StartEngine) -> None:
    engine = start_engine(start_stub())
    engine.update_weights_from_disk("ckpt", 1)
    answer = generate(engine, [1] * 8, max_tokens=9)
    assert (answer.output_len, answer.output_versions, answer.attempts) == (1, [1], 1)


def test_an_answer_outside_the_vocabulary_is_refused(
    start_stub: StartStub, start_engine: StartEngine, tmp_path: Path
) -> None:
    """F9: such an id would end the trainer."""
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    largest = max(answer_tokens([1, 2, 3], 0, 8))
    with pytest.raises(ServerError, match=f"sent token {largest}, which is not in the vocabulary"):
        generate(start_engine(start_stub(), tokenizer_path=str(tmp_path)))


def test_a_refusal_is_never_retried(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub(fault=lambda n: "400")
    with pytest.raises(ConfigError, match="scheduled 400"):
        generate(start_engine(stub))
    assert stub.server.seen["generate"] == 1


def test_retries_end_with_the_last_cause(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub(fault=lambda n: "500")
    with pytest.raises(ServerError, match="no usable answer in 3 tries; the last: .* HTTP 500"):
        generate(start_engine(stub, request_retries=3))
    assert stub.server.seen["generate"] == 3


def test_a_broken_server_is_failed_over_and_then_avoided(start_stub: StartStub, start_engine: StartEngine) -> None:
    broken, sound = start_stub(fault=lambda n: "reset"), start_stub()
    engine = start_engine(broken, sound, consumer_batch_size=50)
    results = engine.rollout_batch([{}] * 50, OneTurn)
    assert all(r.status == "accepted" for r in results)
    assert broken.server.seen["generate"] < 50
    assert sound.server.seen["generate"] == 50


def test_the_turns_of_an_episode_stay_on_one_server_and_load_is_spread(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stubs = [start_stub(delay_s=0.01), start_stub(delay_s=0.01)]
    engine = start_engine(*stubs)
    results = engine.rollout_batch([{}] * 40, TwoTurns)
    assert all(r.status == "accepted" for r in results)
    first, second = (stub.server.seen["generate"] for stub in stubs)
    assert first + second == 80
    assert first == second


def test_an_answer_goes_on_after_a_weight_update_and_keeps_both_versions(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    stub.call(lambda: setattr(stub.server, "hold", asyncio.Event()))
    engine = start_engine(stub, max_head_offpolicyness=2)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate, engine, max_new_tokens=8)
        stub.until_held(1)
        engine.update_weights_from_disk("ckpt", 5)
        stub.call(lambda: stub.server.hold.set())  # type: ignore[union-attr]
        response = running.result(10)
    before, after = (
        answer_tokens([1, 2, 3], 0, 4),
        answer_tokens([1, 2, 3, *answer_tokens([1, 2, 3], 0, 4)], 5, 4),
    )
    assert response.output_tokens == before + after
    assert response.output_versions == [0] * 4 + [5] * 4
    assert response.attempts == 2
    second = stub.server.requests[1]
    assert second["input_ids"] == [1, 2, 3, *before]
    assert second["sampling_params"]["max_new_tokens"] == 4
    assert engine.get_version() == 5


def test_aborts_without_progress_end_in_an_error_not_a_loop(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub(fault=lambda n: "abort")
    with pytest.raises(ServerError, match="9 times in a row without a token"):
        generate(start_engine(stub))


def test_a_server_that_fails_an_update_gets_no_requests_until_it_has_caught_up(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    good, bad = start_stub(), start_stub()
    bad.server.fail_updates = True
    engine = start_engine(good, bad)
    engine.update_weights_from_disk("ckpt", 1)
    engine.rollout_batch([{}] * 10, OneTurn)
    assert (good.server.seen["generate"], bad.server.seen["generate"]) == (10, 0)
    until(lambda: bad.server.seen["update"] > 2)
    bad.server.fail_updates = False
    until(lambda: engine._client.pool.servers[1].usable)  # without another update
    assert bad.server.version == "1"
    assert bad.server.seen["resume"] == bad.server.seen["pause"] + engine_starts(bad)  # never left paused
    engine.rollout_batch([{}] * 10, OneTurn)
    assert bad.server.seen["generate"] > 0


def engine_starts(stub: StubThread) -> int:
    """Return how often a server was resumed because the engine met it, at the start or after a rest."""
    return stub.server.seen["info"]


def test_an_update_no_server_takes_raises_and_keeps_the_version(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    stub = start_stub()
    stub.server.fail_updates = True
    engine = start_engine(stub)
    with pytest.raises(ServerError, match="no server took policy version 1 .*no such folder"):
        engine.update_weights_from_disk("ckpt", 1)
    assert engine.get_version() == 0


def test_no_server_at_all_is_told_at_the_start() -> None:
    with (
        pytest.raises(ServerError, match="no inference server answers: http://127.0.0.1:9"),
        RemoteInfEngine(InferenceEngineConfig(backend="sglang", addresses=["127.0.0.1:9"], request_retries=2)),
    ):
        pass
    with pytest.raises(ConfigError, match="rollout.addresses is empty"):
        RemoteInfEngine(InferenceEngineConfig(backend="sglang"))
    with pytest.raises(ConfigError, match="write host:port"):
        ServerPool(["localhost"])


@pytest.mark.parametrize(
    ("ids", "sampling", "says"),
    [
        ([], {}, "input_ids is empty"),
        ([1, -1], {}, "input_ids holds -1"),
        ([1, True], {}, "input_ids holds True"),
        ([1, 2.0], {}, "input_ids holds 2.0"),
        ([1] * 4096, {}, "the prompt has 4096 tokens and the window 4096"),
        ([1] * 9, {"max_tokens": 9}, "the prompt has 9 tokens and the window 9"),
        ([1], {"n_samples": 2}, "one request gives one answer"),
    ],
)
def test_a_request_no_server_can_serve_is_refused_before_it_is_sent(
    start_stub: StartStub, start_engine: StartEngine, ids: list[int], sampling: dict[str, Any], says: str
) -> None:
    stub = start_stub()
    engine = start_engine(stub)
    with pytest.raises(ConfigError, match=says):
        asyncio.run(engine.agenerate(ModelRequest(input_ids=ids, gconfig=GenerationHyperparameters(**sampling))))
    assert stub.server.seen["generate"] == 0


@pytest.mark.parametrize(
    ("context", "sampling", "said"),
    [
        (20, {"max_new_tokens": 400}, "after 17 tokens because with its prompt of 3 it filled the window of 20 tokens"),
        (4096, {"max_new_tokens": 400, "max_tokens": 9}, "after 6 tokens .* the window of 9 tokens"),
        (20, {"max_new_tokens": 16}, None),
    ],
)
def test_an_answer_that_fills_the_window_is_said_once(
    start_stub: StartStub,
    start_engine: StartEngine,
    caplog: pytest.LogCaptureFixture,
    context: int,
    sampling: dict[str, int],
    said: str | None,
) -> None:
    stub = start_stub(answer_len=500, fault=lambda _: "length")
    stub.server.told = {"context_length": context}
    engine = start_engine(stub)
    for _ in range(2):
        assert generate(engine, [1, 2, 3], ignore_eos=True, **sampling).stop_reason == "length"
    lines = [line for line in caplog.messages if "the window" in line]
    assert len(lines) == (said is not None)
    assert said is None or re.search(said, lines[0])


def test_the_answer_fits_what_the_window_leaves(start_stub: StartStub, start_engine: StartEngine) -> None:
    stub = start_stub()
    generate(start_engine(stub), ids=[1] * 4000, max_new_tokens=500)
    assert stub.server.requests[0]["sampling_params"]["max_new_tokens"] == 96


def test_tokens_of_a_server_that_tells_no_version_get_the_one_at_sending(
    start_stub: StartStub, start_engine: StartEngine
) -> None:
    engine = start_engine(start_stub(tell_version=False))
    engine.set_version(3)
    assert set(generate(engine).output_versions) == {3}


def test_a_reply_without_tokens_needs_no_version(
    start_stub: StartStub, start_engine: StartEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ServerError, match="in a row without a token"):
        generate(start_engine(start_stub(tell_version=False, fault=lambda n: "abort")))
    assert "does not report the weight version" not in caplog.text
    assert generate(start_engine(start_stub(tell_version=False))).output_len == 8
    assert "does not report the weight version" in caplog.text


REPLY = {
    "output_ids": [5, 6],
    "meta_info": {
        "finish_reason": {"type": "stop", "matched": 6},
        "output_token_logprobs": [[-0.1, 5, None], [-0.2, 6, None]],
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "7", "start": 1, "end": 2},
        ],
    },
}


def test_versions_of_a_reply_are_per_token() -> None:
    chunk = SGLang().parse(REPLY)
    assert chunk is not None and chunk.versions == [0, 7]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(list(REPLY)), inner, max_size=3),
    max_leaves=10,
)


@given(where=st.sampled_from(["reply", "meta_info", "output_ids", *REPLY["meta_info"]]), value=json_values)
def test_a_reply_is_either_sound_or_refused(where: str, value: Any) -> None:
    meta = dict(REPLY["meta_info"])  # type: ignore[call-overload]
    reply: Any = {**REPLY, "meta_info": meta}
    if where == "reply":
        reply = value
    elif where in meta:
        meta[where] = value
    else:
        reply[where] = value
    sound_or_refused(SGLang(), reply)


VLLM_REPLY: dict[str, Any] = {
    "token_ids": [5, 6],
    "finish_reason": "length",
    "weight_versions": [{"version": "3", "start": 0, "end": 2}],
    "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]},
}


@given(where=st.sampled_from([*VLLM_REPLY, "logprob"]), value=json_values)
def test_a_reply_of_vllm_is_either_sound_or_refused(where: str, value: Any) -> None:
    choice = {**VLLM_REPLY, where: value}
    if where == "logprob":
        choice["logprobs"] = {"content": [{"logprob": -0.1}, {"logprob": value}]}
    sound_or_refused(VLLM(), {"choices": [choice]})


def sound_or_refused(dialect: Dialect, reply: Any) -> None:
    """F7, F8, F9."""
    try:
        chunk = dialect.parse(reply)
    except BadResponse:
        return
    assert chunk is not None
    assert len(chunk.tokens) == len(chunk.logprobs)
    assert chunk.versions is None or len(chunk.versions) == len(chunk.tokens)
    assert all(type(t) is int and t >= 0 for t in chunk.tokens)
    assert all(math.isfinite(p) and p <= 1e-3 for p in chunk.logprobs)


def test_vllm_replies_and_requests_in_its_own_words() -> None:
    chunk = VLLM().parse({"choices": [VLLM_REPLY]})
    assert chunk is not None and (chunk.tokens, chunk.logprobs, chunk.versions, chunk.finish) == (
        [5, 6],
        [-0.1, -0.2],
        [3, 3],
        "length",
    )
    body = VLLM().generate_body(generation_call(max_new_tokens=7, seed=4))
    assert body["sampling_params"]["max_tokens"] == 7
    assert body["sampling_params"]["seed"] == 4


@pytest.mark.parametrize(("asked", "sent"), [(0, 0), (1, 2), (5, 6), (20, 20)])
def test_vllm_is_asked_for_one_more_top_logprob_because_the_sampled_token_may_replace_the_last(
    asked: int, sent: int
) -> None:
    body = VLLM().generate_body(generation_call(top_logprobs=asked))
    assert body["sampling_params"]["logprobs"] == sent
    best = [{"token_id": place, "logprob": -1.0 * place, "rank": place} for place in range(1, asked + 1)]
    entry = {"logprob": -9.0, "top_logprobs": [{"token_id": 9, "logprob": -9.0, "rank": 30}, *best]}
    choice = {"token_ids": [9], "finish_reason": "stop", "logprobs": {"content": [entry]}}
    if 0 < asked < 20:
        chunk = VLLM().parse({"choices": [choice]}, top_logprobs=asked)
        assert chunk is not None and chunk.top_logprobs == [[(place, -1.0 * place) for place in range(1, asked + 1)]]


@pytest.mark.parametrize(("top_k", "sent"), [(None, -1), (5, 5)])
def test_vllm_takes_minus_one_for_no_top_k(top_k: int | None, sent: int) -> None:
    gconfig = GenerationHyperparameters(top_k=top_k)
    body = VLLM().generate_body(generation_call(gconfig))
    assert body["sampling_params"]["top_k"] == sent


def test_ignoring_the_end_ignores_stop_tokens_on_vllm_too() -> None:
    gconfig = GenerationHyperparameters(ignore_eos=True, stop_token_ids=[2])
    body = VLLM().generate_body(generation_call(gconfig))
    assert "stop_token_ids" not in body["sampling_params"]


@pytest.mark.parametrize(
    ("dialect", "replies", "expected"),
    [
        (
            SGLang(),
            [{"context_length": 2048, "max_req_input_len": 2042}, {"model_path": "M", "weight_version": "default"}],
            ServerInfo(context_length=2042, model="M", version=0),
        ),
        (
            SGLang(),
            [{"vocab_size": 64, "is_paused": True, "weight_version": "odd"}, []],
            ServerInfo(None, 64, paused=True),
        ),
        (
            VLLM(),
            [{"data": [{"root": "M", "max_model_len": 2048}]}, {"weight_version": "21"}, {"is_paused": False}],
            ServerInfo(2048, None, "M", 21, paused=False),
        ),
        (VLLM(), [{"data": []}, "odd", None], ServerInfo()),
    ],
)
def test_what_servers_report_about_themselves(dialect: Dialect, replies: list[Any], expected: ServerInfo) -> None:
    requests = ServerRequests(InferenceEngineConfig(addresses=["s:1"]), dialect)
    bodies = dict(itertools.zip_longest(dialect.info_paths, replies))

    async def send(_: Server, path: str) -> tuple[int, bytes]:
        return 200, json.dumps(bodies[path]).encode()

    requests.exchange = send  # type: ignore[assignment, method-assign]
    assert asyncio.run(requests.info(Server("http://s:1", 0))) == expected
