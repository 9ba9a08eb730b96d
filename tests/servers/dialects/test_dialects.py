"""What is sent to SGLang, vLLM and the embedded server, and which of their replies are believed."""

from __future__ import annotations
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
import orjson
import pytest
from areal_lite.api import GenerationHyperparameters
from areal_lite.config.trainer_config import AdapterShape
from areal_lite.servers.dialects import Dialect
from areal_lite.servers.dialects.dialect import (
    BadResponse,
    Chunk,
    ControlCall,
    ErrorReply,
    ServerInfo,
    ServerLimits,
    update_error,
)
from areal_lite.servers.dialects.reply_reader import ReceiverError, ReplyReader
from areal_lite.servers.dialects.sglang import SGLang
from areal_lite.servers.dialects.vllm import VLLM
from areal_lite.servers.weights.published_weights import WeightBucket, WeightFolder
from tests.fixtures.engines import generation_call

EMBEDDED = SGLang(embedded=True)
GROUP: Any = SimpleNamespace(name="g", master_address="host", master_port=5, size=3, backend="nccl")
BUCKET = WeightBucket({"w": SimpleNamespace(dtype="torch.float32", shape=(2, 3))})  # type: ignore[dict-item]
TENSOR = {"names": ["w"], "dtypes": ["float32"], "shapes": [[2, 3]]}
SHAPE = AdapterShape(8, ("q_proj",))
ADAPTER = WeightFolder("folder", 4, SHAPE)

SHARED = {"stop": ["x"], "presence_penalty": 0.5, "frequency_penalty": 0.25, "min_p": 0.1, "repetition_penalty": 2.0}
ALL = {**SHARED, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "logit_bias": {5: -1.0}, "regex": "a+"}


def body_of(dialect: Dialect, fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings = {"input_ids": [1, 2], "max_new_tokens": 7} | more
    return dialect.generate_body(generation_call(GenerationHyperparameters(**fields), **settings))


@pytest.mark.parametrize("dialect", [SGLang(), EMBEDDED])
def test_what_sglang_is_asked_for(dialect: Dialect) -> None:
    plain = {"temperature": 1.0, "skip_special_tokens": True, "max_new_tokens": 7}
    body = {"rid": "r", "input_ids": [1, 2], "sampling_params": plain, "return_logprob": True, "stream": False}
    assert body_of(dialect, {}) == body
    ours = dialect is EMBEDDED
    asked = body_of(
        dialect, ALL | {"stop_token_ids": [3], "ignore_eos": True}, min_new_tokens=3, seed=0, num_continued=2,
        top_logprobs=4, stream=True,
    )  # fmt: skip
    sampling = SHARED | {"stop_token_ids": [3], "ignore_eos": True, "logit_bias": {"5": -1.0}, "regex": "a+"}
    sampling |= {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_new_tokens": 3, "sampling_seed": 0}
    own = {"num_continued": 2, "incremental_streaming_output": True} if ours else {}
    assert asked == body | {"sampling_params": plain | sampling, "stream": True, "top_logprobs_num": 4} | own
    assert body_of(dialect, {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "greedy": True})["sampling_params"] == plain | {
        "temperature": 0.0
    }


def test_what_vllm_is_asked_for() -> None:
    plain = {
        "max_tokens": 7, "min_tokens": 0, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0,
        "skip_special_tokens": True,
    }  # fmt: skip
    body = {"request_id": "r", "token_ids": [1, 2], "sampling_params": plain, "stream": False}
    assert body_of(VLLM(), {}) == body
    sampling = SHARED | {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_tokens": 3, "seed": 0, "logprobs": 5}
    sampling |= {"stop_token_ids": [3], "logit_bias": {"5": -1.0}, "structured_outputs": {"regex": "a+"}}
    asked = body_of(
        VLLM(), ALL | {"stop_token_ids": [3]}, min_new_tokens=3, seed=0, num_continued=2, top_logprobs=4, stream=True
    )
    assert asked == body | {"sampling_params": plain | sampling, "stream": True}
    assert body_of(VLLM(), {"ignore_eos": True})["sampling_params"] == plain | {"ignore_eos": True}


def call(path: str, **body: Any) -> ControlCall:
    return ControlCall(path, body)


def on_workers(method: str, **arguments: Any) -> ControlCall:
    return call("/collective_rpc", method=method, kwargs=arguments)


RECEIVE = TENSOR | {"group_name": "g"}
JOIN = {"master_address": "host", "master_port": 5, "backend": "nccl"}
LORA = {"lora_name": "n", "lora_path": "folder"}


@pytest.mark.parametrize("dialect", [SGLang(), EMBEDDED])
def test_calls_of_sglangs_control_plane(dialect: SGLang) -> None:
    ours = dialect is EMBEDDED
    assert (dialect.keeps_adapter, dialect.continues_constraints) == (not ours, ours)
    assert dialect.receives_while_generating == ours
    assert dialect.pause() == call("/pause_generation", mode="abort")
    assert dialect.pause(keep=True) == call("/pause_generation", mode="retract")
    assert dialect.load_folder(WeightFolder("folder", 3)) == [
        call("/update_weights_from_disk", model_path="folder", weight_version="3", flush_cache=True)
    ]
    assert dialect.join_group(GROUP) == call(
        "/init_weights_update_group", **JOIN, rank_offset=1, world_size=3, group_name="g"
    )
    path = "/update_weights_from_distributed"
    assert dialect.receive(BUCKET, "g", None) == call(path, **RECEIVE, flush_cache=False)
    assert dialect.receive(BUCKET, "g", 3) == call(path, **RECEIVE, flush_cache=True, weight_version="3")
    if ours:
        assert dialect.adapter_flags(SHAPE) == {}
        assert dialect.load_adapter("n", ADAPTER) == [call("/load_lora_adapter", **LORA, weight_version="4")]
    else:
        flags = {"enable-lora": True, "max-lora-rank": 8, "lora-target-modules": ["q_proj"]}
        assert dialect.adapter_flags(SHAPE) == flags
        assert dialect.load_adapter("n", ADAPTER) == [
            call("/load_lora_adapter", **LORA),
            call("/update_weight_version", new_version="4", abort_all_requests=False),
        ]


def test_calls_of_vllms_control_plane() -> None:
    dialect = VLLM()
    assert dialect.keeps_adapter and dialect.receives_while_generating and not dialect.continues_constraints
    assert (dialect.pause(), dialect.pause(keep=True)) == (call("/pause?mode=abort"), call("/pause?mode=keep"))
    version = [call("/update_weight_version", new_version="3"), call("/reset_prefix_cache")]
    assert dialect.load_folder(WeightFolder("folder", 3)) == [
        on_workers("load_checkpoint_dir", weights_path="folder"),
        *version,
    ]
    assert dialect.join_group(GROUP) == on_workers("join_weight_group", **JOIN, name="g", size=3)
    assert dialect.receive(BUCKET, "g", 3) == on_workers("receive_weights", **TENSOR, name="g")
    assert dialect.end_broadcast(3) == [on_workers("load_received_weights"), *version]
    flags = {"enable-lora": True, "max-lora-rank": 8, "max-loras": 4, "max-cpu-loras": 16}
    assert dialect.adapter_flags(SHAPE) == flags
    assert dialect.load_adapter("n", ADAPTER) == [
        call("/v1/load_lora_adapter", **LORA),
        call("/update_weight_version", new_version="4"),
    ]


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"success": False, "message": "no"}, "no"),
        ({"success": True, "message": "yes"}, None),
        ({}, None),
        ({"results": [{"success": True}, None, {"success": False, "message": "no"}]}, "no"),
        ({"results": [{"success": True}, {}, "odd"]}, None),
        ({"results": None}, None),
        ([], None),
    ],
)
def test_an_update_with_status_200_may_have_failed(reply: Any, error: str | None) -> None:
    assert update_error(reply) == error


@pytest.mark.parametrize("odd", [None, "odd", 1.5, []])
def test_facts_of_unknown_types_are_none(odd: Any) -> None:
    names = ["context_length", "max_req_input_len", "vocab_size", "weight_version", "is_paused", "tp_size"]
    assert SGLang().parse_info(dict.fromkeys(names, odd)) == ServerInfo()
    names = ["weight_version", "is_paused", "world_size"]
    told = dict.fromkeys(names, odd) | {"data": [{"max_model_len": odd}]}
    assert VLLM().parse_info(told) == ServerInfo()
    facts = {"context_length": 9, "vocab_size": 8, "model_path": "m", "weight_version": "3", "is_paused": False}
    assert SGLang().parse_info(facts | {"device": "cuda", "tp_size": 2}) == ServerInfo(9, 8, "m", 3, False, "cuda", 2)
    assert VLLM().parse_info({"world_size": 2}) == ServerInfo(num_ranks=2)


# -- replies ---------------------------------------------------------------------------------------


def sglang(tokens: Sequence[int] = (5, 6), logprobs: Sequence[Any] = (-0.5, 0.0), **meta: Any) -> dict[str, Any]:
    pairs = [[logprob, token, None] for logprob, token in zip(logprobs, tokens, strict=True)]
    return {
        "output_ids": list(tokens),
        "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": pairs} | meta,
    }


def vllm(tokens: Sequence[int] = (5, 6), logprobs: Sequence[Any] = (-0.5, 0.0), **choice: Any) -> dict[str, Any]:
    content = [{"logprob": logprob} for logprob in logprobs]
    more = {"token_ids": list(tokens), "logprobs": {"content": content}, "finish_reason": "stop"}
    return {"choices": [more | choice]}


def parsed(dialect: Dialect, reply: Any, received: int = 0, **options: Any) -> Chunk:
    found = dialect.parse(reply, received, **options)
    assert found is not None
    return found


def spans(*ends: int, version: Any = "3") -> dict[str, Any]:
    """Return spans that end there."""
    starts = [0, *ends[:-1]]
    pairs = zip(starts, ends, strict=True)
    return {"weight_versions": [{"version": version, "start": start, "end": end} for start, end in pairs]}


def gap() -> dict[str, Any]:
    return {"weight_versions": [{"version": "3", "start": 1, "end": 2}]}


@pytest.mark.parametrize("answer", [sglang, vllm])
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tokens": (5, -1)}, "token ids that are not whole numbers from 0"),
        ({"tokens": (5, True)}, "token ids that are not whole numbers from 0"),
        ({"logprobs": (-0.5, "0")}, "log-probs that are not numbers"),
        ({"logprobs": (-0.5, True)}, "log-probs that are not numbers"),
        ({"logprobs": (-0.5, math.nan)}, "not finite numbers up to 0"),
        ({"logprobs": (-0.5, -math.inf)}, "not finite numbers up to 0"),
        ({"logprobs": (-0.5, 0.01)}, "not finite numbers up to 0"),
        (spans(1), "version spans over 1 of 2 tokens"),
        (spans(1, 3), "a gap or no end from token 1 of 2"),
        (gap(), "a gap or no end from token 0 of 2"),
        (spans(2, version="new"), "the weight version 'new': it must be a number"),
        (spans(2, version="-7"), "the weight version '-7'"),
        (spans(2, version="3.7"), "the weight version '3.7'"),
        (spans(2, version="9" * 30), "the weight version '9{30}'"),
        (spans(2, version="9" * 9000), "the weight version '9{79}:"),
        (spans(2, version=3.7), "the weight version 3.7"),
        (spans(2, version=-5), "the weight version -5"),
        (spans(2, version=True), "the weight version True"),
        (spans(2, version=10**9), "the weight version 1000000000"),
        ({"logprobs": (-0.5, -1e39)}, "not finite numbers up to 0"),
        ({"logprobs": (-0.5, -3.5e38)}, "not finite numbers up to 0"),
        ({"logprobs": (-2e38, -3e38)}, None),
        (spans(2, version=3), None),
        ({}, None),
        (spans(1, 2), None),
        ({"tokens": (0, 0)}, None),
        ({"logprobs": (0, 0.0)}, None),
        ({"logprobs": (-1, -2)}, None),
        ({"logprobs": (0.0, 0.001)}, None),
        ({"tokens": (), "logprobs": ()}, None),
    ],
)
def test_a_reply_is_refused_for_each_thing_that_cannot_be(
    answer: Any, fields: dict[str, Any], says: str | None
) -> None:
    dialect: Dialect = SGLang() if answer is sglang else VLLM()
    reply = answer(**fields)
    if says is None:
        chunk = parsed(dialect, reply)
        assert chunk.tokens == list(fields.get("tokens", (5, 6)))
        assert chunk.versions == ([3, 3] if "weight_versions" in fields else None)
        assert chunk.top_logprobs == []
        return
    with pytest.raises(BadResponse, match=says):
        dialect.parse(reply)


def test_an_unknown_finish_reason_is_refused_and_a_repetition_is_a_stop() -> None:
    odd = {"type": "odd"}
    event = {"completion_tokens": 2, "finish_reason": odd}
    for refused in (
        lambda: SGLang().parse(sglang(finish_reason=odd)),
        lambda: SGLang().parse(sglang(**event), 1),
        lambda: VLLM().parse(vllm(finish_reason="odd")),
    ):
        with pytest.raises(BadResponse, match="the unknown finish reason 'odd'"):
            refused()
    assert parsed(VLLM(), vllm(finish_reason="repetition")).finish == "stop"


def test_a_version_of_the_whole_reply_is_that_of_its_tokens() -> None:
    assert parsed(SGLang(), sglang(weight_version="3")).versions == [3, 3]
    assert parsed(SGLang(), sglang(weight_version="default")).versions == [0, 0]
    assert parsed(SGLang(), sglang(weight_version="3", **spans(2, version="4"))).versions == [4, 4]


def test_ids_without_their_log_probs_are_refused() -> None:
    reply = sglang() | {"output_ids": [5, 7]}
    with pytest.raises(BadResponse, match="2 output_ids that differ"):
        SGLang().parse(reply)
    del reply["output_ids"]
    assert parsed(SGLang(), reply).tokens == [5, 6]
    for lacking in (vllm(logprobs=[-0.5]), vllm(logprobs=[]), vllm() | {"choices": [{"token_ids": [5]}]}):
        with pytest.raises(BadResponse):
            VLLM().parse(lacking)


TOP = [[[-0.5, 5, None], [-1.0, 7, None]], [[0.0, 6, None], [-9.0, 8, None]]]


def test_top_log_probs_are_those_of_the_new_tokens() -> None:
    whole = sglang(output_top_logprobs=TOP, completion_tokens=2)
    assert parsed(SGLang(), whole, top_logprobs=2).top_logprobs == [
        [(5, -0.5), (7, -1.0)],
        [(6, 0.0), (8, -9.0)],
    ]
    for event in (whole, sglang([6], [0.0], output_top_logprobs=TOP[1:], completion_tokens=2)):
        found = parsed(SGLang(), event, 1, top_logprobs=2)
        assert (found.tokens, found.logprobs, found.top_logprobs) == ([6], [0.0], [[(6, 0.0), (8, -9.0)]])
    for rows in (None, TOP[:1]):
        with pytest.raises(BadResponse, match=f"2 tokens, {len(rows or [])} lists of top log-probs"):
            SGLang().parse(sglang(output_top_logprobs=rows), top_logprobs=2)
    with pytest.raises(BadResponse, match="log-probs that are not"):
        SGLang().parse(sglang(output_top_logprobs=[TOP[0], [[math.nan, 6, None]]]), top_logprobs=2)


# -- events of a stream ----------------------------------------------------------------------------


def test_an_event_of_sglang_adds_its_new_tokens() -> None:
    def parse(received: int, event: dict[str, Any]) -> tuple[Any, ...]:
        found = parsed(SGLang(), event, received)
        assert found.top_logprobs == []
        return found.tokens, found.logprobs, found.versions, found.finish

    goes_on = {"finish_reason": None, "completion_tokens": 2}
    assert parse(0, sglang(**goes_on)) == ([5, 6], [-0.5, 0.0], None, None)
    assert parse(1, sglang(**goes_on, weight_version="3")) == ([6], [0.0], [3], None)
    assert parse(1, sglang(completion_tokens=2, **spans(1, 2))) == ([6], [0.0], [3, 3], "stop")
    assert parse(2, sglang(**goes_on)) == ([], [], None, None)
    assert parse(1, sglang([6], [0.0], **goes_on)) == ([6], [0.0], None, None)
    aborted = {"finish_reason": {"type": "abort"}, "output_token_logprobs": None}
    assert parse(2, sglang([], [], **aborted)) == ([], [], None, "abort")
    assert parse(1, sglang(completion_tokens=2, finish_reason={"type": "stop", "status_code": 500}))[-1] == "stop"
    refused = ((3, 2, "2 log-probs for -1"), (1, 4, "2 log-probs for 3"), (0, 1, "2 log-probs for 1"))
    for received, total, said in refused:
        with pytest.raises(BadResponse, match=f"{said} new tokens"):
            parse(received, sglang(finish_reason=None, completion_tokens=total))
    for listed in ([5, 7], [4, 6], [4, 5, 6], [], [6, 5]):
        with pytest.raises(BadResponse, match="output_ids that differ"):
            parse(1, sglang(**goes_on) | {"output_ids": listed})
    with pytest.raises(BadResponse, match="without the fields"):
        parse(1, {"meta_info": {}})
    with pytest.raises(ErrorReply, match="too many") as raised:
        parse(0, sglang([], [], finish_reason={"type": "abort", "status_code": 503, "message": "too many"}))
    assert (raised.value.status, raised.value.retry_after_s, str(raised.value)) == (503, 0.0, "too many")


def test_an_event_of_vllm_adds_its_tokens() -> None:
    def parse(received: int, event: dict[str, Any], **options: Any) -> tuple[Any, ...]:
        found = parsed(VLLM(), event, received, **options)
        return found.tokens, found.logprobs, found.top_logprobs, found.versions, found.finish

    assert VLLM().parse({"choices": []}) is None
    assert parse(0, vllm(finish_reason=None)) == ([5, 6], [-0.5, 0.0], [], None, None)
    assert parse(1, vllm(**spans(3))) == ([5, 6], [-0.5, 0.0], [], [3, 3, 3], "stop")
    (usual,) = vllm()["choices"]
    assert parse(1, {"choices": [usual | {"token_ids": None, "logprobs": None}]}) == ([], [], [], None, "stop")
    best = [{"token_id": 7, "logprob": -0.25, "rank": 1}]
    content = [{"logprob": -0.5, "top_logprobs": [{"token_id": 5, "logprob": -0.5, "rank": 2}, *best]}]
    event = {"choices": [usual | {"token_ids": [5], "logprobs": {"content": content}}]}
    assert parse(0, event, top_logprobs=2)[2] == [[(7, -0.25), (5, -0.5)]]
    with pytest.raises(BadResponse, match="without the fields"):
        parse(1, {"choices": [{}]})


def event_of(*tokens: int, received: int = 0, finish: str | None = None, **meta: Any) -> bytes:
    meta["finish_reason"] = None if finish is None else {"type": finish}
    event = sglang(tokens, [-0.5] * len(tokens), completion_tokens=received + len(tokens), **meta)
    return b"data: " + orjson.dumps(event) + b"\n\n"


def all_of(*tokens: int) -> bytes:
    """Return an event with all tokens so far; the last is new."""
    return event_of(*tokens, received=0)


def mixed(first: str, second: str) -> dict[str, Any]:
    """Return the spans of a token of each version."""
    versions = enumerate((first, second))
    return {"weight_versions": [{"version": version, "start": i, "end": i + 1} for i, version in versions]}


def stream_of(received: list[int], **options: Any) -> ReplyReader:
    bounds = {name: options.pop(name) for name in options.keys() & {"vocab_size", "newest_version"}}
    call, limits = generation_call(**{"input_ids": [1, 2]} | options), ServerLimits(**bounds)
    return ReplyReader(SGLang(), call, lambda ids, _: received.extend(ids), version=2, limits=limits)


@pytest.mark.parametrize(
    ("options", "event", "says"),
    [
        ({"vocab_size": 7}, event_of(6, received=1), None),
        ({"vocab_size": 6}, event_of(6, received=1), r"token 6, which is not in the vocabulary \[0, 6\)"),
        ({"max_new_tokens": 2}, event_of(6, received=1), None),
        ({"max_new_tokens": 2}, event_of(6, 6, received=1), "3 tokens for a request of at most 2"),
        ({"newest_version": 3}, event_of(6, received=1, weight_version="3"), None),
        ({"newest_version": 3}, event_of(6, received=1, weight_version="4"), "version 4, but the newest is 3"),
        ({"newest_version": 3}, event_of(6, received=1, weight_version="3", **spans(2, version="4")), "version 4"),
        ({"newest_version": 3}, event_of(6, received=1), None),
        ({"newest_version": 1}, event_of(6, received=1, weight_version="2"), None),  # the client's own
        ({}, event_of(6, received=1, weight_version="3"), "tokens of version 3, but the newest is 2"),
        ({"newest_version": 3}, event_of(6, received=1, **mixed("99", "3")), "version 99, but the newest is 3"),
        ({}, event_of(6, received=1, id="r", prompt_tokens=2), None),
        ({}, event_of(6, received=1, id="s"), "the answer to another request, 's' instead of 'r'"),
        ({}, event_of(6, received=1, id=7), "the answer to another request, 7"),
        ({}, event_of(6, received=1, prompt_tokens=3), "an answer to 3 prompt tokens instead of 2"),
        ({}, event_of(6, received=1, prompt_tokens=0), "an answer to 0 prompt tokens instead of 2"),
        ({}, all_of(5, 6), None),
        ({}, all_of(4, 6), "a stream that changes its earlier tokens"),
        ({}, all_of(5, 6).replace(b"[-0.5,5,", b"[-0.5,4,"), "output_ids that differ"),
        ({}, b"data: {oops\n\n", "a reply that is not JSON"),
        ({}, b": a comment\n\nid: 5\n\ndata: [DONE]\n\n", ""),
    ],
)
def test_a_stream_refuses_what_cannot_be_and_keeps_what_came_before(
    options: dict[str, Any], event: bytes, says: str | None
) -> None:
    received: list[int] = []
    stream = stream_of(received, **options)
    stream.feed(event_of(5))
    if says:
        with pytest.raises(BadResponse, match=says):
            stream.feed(event)
    else:
        stream.feed(event)
    assert received == stream.chunk().tokens == ([5, 6] if says is None else [5])
    assert len(stream) == len(received) and stream.finish is None and stream.chunk().finish == "abort"


def test_a_stream_labels_tokens_without_a_version_and_says_so() -> None:
    received: list[int] = []
    stream = stream_of(received, newest_version=3)
    assert stream.reports_versions
    stream.feed(event_of(5, weight_version="3"))
    assert stream.reports_versions
    stream.feed(event_of(6, received=1))
    assert (stream.chunk().versions, stream.reports_versions) == ([3, 2], False)
    stream.feed(event_of(7, received=2, weight_version="3"))
    assert (stream.chunk().versions, stream.reports_versions) == ([3, 2, 3], False)
    stream.feed(event_of(received=3, finish="stop", **spans(2, 3)))
    assert (stream.chunk().versions, stream.reports_versions) == ([3, 3, 3], True)
    stream.feed(event_of(8, received=3))  # after the end
    assert stream.finish and stream.chunk().finish == "stop" and received == [5, 6, 7]


def test_a_stream_without_top_log_probs_asks_for_none_and_its_receiver_may_fail() -> None:
    def fail(ids: Sequence[int], logprobs: Sequence[float]) -> None:
        raise ValueError("mine")

    top: list[int] = []
    stream = stream_of(top, top_logprobs=1)
    stream.feed(event_of(5, output_top_logprobs=TOP[:1]))
    assert stream.chunk().top_logprobs == [[(5, -0.5), (7, -1.0)]] and stream.chunk().logprobs == [-0.5]
    stream_of([], vocab_size=1).feed(event_of(finish="abort"))
    stream = ReplyReader(SGLang(), generation_call(), fail, version=0, limits=ServerLimits())
    with pytest.raises(ReceiverError) as raised:
        stream.feed(event_of(5))
    assert str(raised.value.__cause__) == "mine"
    assert stream.chunk().top_logprobs == []


def test_an_aborted_answer_without_tokens_needs_no_prompt_count() -> None:
    stream = stream_of([])
    stream.feed(event_of(finish="abort", prompt_tokens=0, id="r"))
    assert stream.chunk().tokens == []


@pytest.mark.parametrize(("incremental", "last"), [(True, 6), (True, 5), (False, 6)])
def test_an_abort_may_repeat_the_last_token_and_no_other(incremental: bool, last: int) -> None:
    stream = stream_of([])
    stream.feed(event_of(5))
    stream.feed(event_of(6, received=1) if incremental else all_of(5, 6))
    reply = sglang([], [], finish_reason={"type": "abort"}, completion_tokens=2) | {"output_ids": [last]}
    if last == 6:
        stream.take(orjson.dumps(reply))
        assert stream.chunk().tokens == [5, 6]
    else:
        with pytest.raises(BadResponse, match="changes its earlier tokens"):
            stream.take(orjson.dumps(reply))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({}, None),
        ({"request_id": "generate-tokens-r", "usage": {"prompt_tokens": 2}, "model": "m"}, None),
        ({"request_id": None, "usage": None, "model": None}, None),
        ({"usage": {"prompt_tokens": None}}, None),
        ({"request_id": "generate-tokens-s"}, "the answer to another request, 's' instead of 'r'"),
        ({"usage": {"prompt_tokens": 3}}, "an answer to 3 prompt tokens instead of 2"),
        ({"request_id": 5}, "without the fields"),
        ({"usage": 5}, "without the fields"),
    ],
)
def test_vllm_names_the_request_that_it_answers(fields: dict[str, Any], says: str | None) -> None:
    call = generation_call(input_ids=[1, 2])
    reader = ReplyReader(VLLM(), call, None, version=0, limits=ServerLimits())
    if says is None:
        reader.take(orjson.dumps(vllm() | fields))
        assert (reader.chunk().tokens, reader.model) == ([5, 6], fields.get("model"))
    else:
        with pytest.raises(BadResponse, match=says):
            reader.take(orjson.dumps(vllm() | fields))


def test_an_event_is_read_up_to_what_its_tokens_can_take() -> None:
    for top, most in ((0, 2**16 + 2 * 1024), (3, 2**16 + 2 * (1024 + 3 * 256))):
        stream = stream_of([], max_new_tokens=2, top_logprobs=top)
        stream.feed(b": " + b"x" * (most - 2))
        with pytest.raises(BadResponse, match=f"an event of more than {most} bytes"):
            stream.feed(b"x")
