"""Sampled spans are the one truth: over any conversation they are kept, extended, and trained once."""

from __future__ import annotations
import asyncio
import gc
import json
import random
from typing import Any
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.agents.session.request_options import warn_once
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ConfigError, ContextOverflowError
from tests.agents.scripted_engine import ScriptedEngine, create, random_ids, tokenizer

TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>'


def make_session(answers: Any, family: str = "chatml", **kwargs: Any) -> tuple[ChatSession, ScriptedEngine]:
    engine = ScriptedEngine(answers, family)
    gconfig = kwargs.pop("gconfig", GenerationHyperparameters())
    return ChatSession(engine, ChatRenderer(engine.tokenizer), gconfig, **kwargs), engine  # type: ignore[arg-type]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer_of(completion: dict[str, Any]) -> dict[str, Any]:
    return dict(completion["choices"][0]["message"])


def trained(session: ChatSession, style: Any = "concat") -> list[tuple[float, int, int]]:
    """Return (log-prob, id, version) of every trained token of every row."""
    found = []
    for row in session.history.export(style).values():
        row.reward = 1.0
        t = {key: value[0].tolist() for key, value in row.to_tensor_dict().items()}
        for i, mask in enumerate(t["loss_mask"]):
            if mask:
                found.append((t["logprobs"][i], t["input_ids"][i], t["versions"][i]))
            else:
                assert (t["logprobs"][i], t["versions"][i]) == (0, -1)
    return sorted(found)


def sampled(engine: ScriptedEngine) -> list[tuple[float, int, int]]:
    return sorted(
        triple
        for r in engine.responses
        for triple in zip(r.output_logprobs, r.output_tokens, r.output_versions, strict=True)
    )


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "qwen3"])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), turns=st.integers(1, 7))
def test_every_sampled_token_is_kept_extended_and_trained_once(family: str, seed: int, turns: int) -> None:
    """Conversations that go on, begin anew, branch off and are edited, with answers of any ids."""
    draw = random.Random(seed)
    end = tokenizer(family).eos_token_id

    def answer(_: Any) -> list[int]:
        return random_ids(draw, family, draw.randrange(0, 9)) + ([end] if draw.random() < 0.7 else [])

    async def play() -> None:
        session, engine = make_session(answer, family)
        histories: list[tuple[list[Any], int | None]] = [([], None)]
        for turn in range(turns):
            history, parent = draw.choice(histories) if draw.random() < 0.3 else histories[-1]
            messages = [*history, user(f"question {turn} " + "?" * draw.randrange(4))]
            edited = bool(history) and draw.random() < 0.2
            if edited:
                messages[0] = user(f"edited {turn}")
            completion = await create(session, {"model": "m", "messages": messages})
            if parent is not None and not edited:
                recorded = engine.responses[parent]
                prefix = recorded.input_tokens + recorded.output_tokens
                assert engine.requests[-1].input_ids[: len(prefix)] == prefix
            else:
                whole = tokenizer(family).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
                assert engine.requests[-1].input_ids == tokenizer(family).encode(whole, add_special_tokens=False)
            assert completion["usage"]["completion_tokens"] == engine.responses[-1].output_len
            histories.append(([*messages, answer_of(completion)], len(engine.responses) - 1))
        assert trained(session, "concat") == trained(session, "individual") == sampled(engine)
        assert session.clean_turns + session.forks == turns
        assert len(session.history.export("individual")) == turns

    asyncio.run(play())


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_where_the_answer_is_the_templates_text_the_ids_are_its_full_render(family: str, data: st.DataObject) -> None:
    words = st.text("abc xyz,.?!\nÄ水", max_size=12).map(lambda s: f"w{s}w")
    pairs = data.draw(st.lists(st.tuples(words, words), min_size=2, max_size=5))
    has_system = family != "mistral" and data.draw(st.booleans())
    cut = data.draw(st.integers(0, len(pairs) - 1))  # this answer lacks its end token: it is supplied, untrained

    async def play() -> None:
        encode = tokenizer(family).encode
        answers = [a if i != cut else encode(a, add_special_tokens=False) for i, (_, a) in enumerate(pairs)]
        session, engine = make_session(answers, family)
        messages: list[Any] = [{"role": "system", "content": "Be brief."}] if has_system else []
        for question, _ in pairs:
            messages.append(user(question))
            messages.append(answer_of(await create(session, {"messages": messages})))
            whole = tokenizer(family).apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
            assert engine.requests[-1].input_ids == encode(whole, add_special_tokens=False)
        assert (session.clean_turns, session.forks, len(session.history.export("concat"))) == (len(pairs), 0, 1)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


CONTINUE = {"continue_final_message": True, "add_generation_prompt": False}


def test_an_answer_goes_on_from_the_text_that_begins_it() -> None:
    async def play() -> None:
        session, engine = make_session(["is 42", "Yes.", "No."])
        begun = [user("What?"), {"role": "assistant", "content": "The answer "}]
        text = (await create(session, {"messages": begun, **CONTINUE}))["choices"][0]["message"]["content"]
        whole = tokenizer().apply_chat_template(begun[:1], tokenize=False, add_generation_prompt=True) + "The answer "
        assert engine.requests[0].input_ids == tokenizer().encode(whole, add_special_tokens=False)
        assert text == "is 42"
        joined = [*begun[:1], {"role": "assistant", "content": f"The answer {text}"}, user("Sure?")]
        await create(session, {"messages": joined})
        first = engine.responses[0].input_tokens + engine.responses[0].output_tokens
        assert engine.requests[1].input_ids[: len(first)] == first
        await create(session, {"messages": [*joined, {"role": "assistant", "content": "Hm"}], **CONTINUE})
        second = engine.requests[1].input_ids
        assert engine.requests[2].input_ids == second + tokenizer().encode("Hm", add_special_tokens=False)
        assert (session.clean_turns, session.forks) == (3, 0)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


def test_an_answer_that_was_cut_goes_on_from_its_ids() -> None:
    async def play() -> None:
        ids = tokenizer().encode("The an", add_special_tokens=False)
        session, engine = make_session([ids, "swer", "Yes."])
        messages = [user("What?")]
        cut = answer_of(await create(session, {"messages": messages}))
        rest = answer_of(await create(session, {"messages": [*messages, cut], **CONTINUE}))
        assert engine.requests[1].input_ids == engine.responses[0].input_tokens + ids
        answer = {"role": "assistant", "content": cut["content"] + rest["content"]}
        await create(session, {"messages": [*messages, answer, user("Sure?")]})
        second = engine.responses[1].input_tokens + engine.responses[1].output_tokens
        assert engine.requests[2].input_ids[: len(second)] == second
        assert trained(session) == sampled(engine) and len(session.history.export("concat")) == 1

    asyncio.run(play())


@pytest.mark.parametrize(
    ("last", "fields", "says"),
    [
        (user("x"), CONTINUE, "as the last message"),
        ({"role": "assistant", "content": ""}, CONTINUE, "as the last message"),
        ({"role": "assistant", "content": "x", "reasoning_content": "y"}, CONTINUE, "as the last message"),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": False}, "or set continue_final_message"),
    ],
)
def test_what_begins_no_answer_is_refused(last: Any, fields: Any, says: str) -> None:
    session, _ = make_session([])
    with pytest.raises(RequestError, match=says):
        asyncio.run(create(session, {"messages": [user("What?"), last], **fields}))


def test_tool_rounds_are_one_sequence_equal_to_the_full_render() -> None:
    async def play() -> None:
        session, engine = make_session([CALL, "two calls\n" + CALL + "\n" + CALL, "It is 3."])
        messages: list[Any] = [user("1 + 2?")]
        for results in (1, 2, 0):
            completion = await create(session, {"messages": messages, "tools": [TOOL]})
            message = answer_of(completion)
            assert len(message.get("tool_calls", [])) == results
            assert completion["choices"][0]["finish_reason"] == ("tool_calls" if results else "stop")
            messages.append({**message, "refusal": None, "annotations": None, "function_call": None})
            for call in message.get("tool_calls", []):
                assert call["function"] == {"name": "calculator", "arguments": '{"expression": "1 + 2"}'}
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "3"})
        for message in messages:
            for call in message.get("tool_calls", []):
                call["function"]["arguments"] = {"expression": "1 + 2"}
            message["content"] = message["content"] or ""
        whole = tokenizer().apply_chat_template(messages[:-1], tools=[TOOL], tokenize=False, add_generation_prompt=True)
        assert engine.requests[-1].input_ids == tokenizer().encode(whole, add_special_tokens=False)
        assert (session.clean_turns, session.forks, len(session.history.export("concat"))) == (3, 0, 1)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n{broken\n</tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>" + "[" * 10_000,
    ],
)
def test_a_tool_call_without_a_readable_name_stays_text_and_is_counted(text: str) -> None:
    session, _ = make_session([text, text])
    for count, tools in ((1, [TOOL]), (1, None)):
        choice = asyncio.run(create(session, {"messages": [user("?")], "tools": tools}))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"] == {"role": "assistant", "content": text}
        assert session.tool_parse_errors == count


@pytest.mark.parametrize(
    "arguments",
    [
        '{"x": "\\ud800"}',
        '{"x": NaN}',
        '{"x": 1e999}',
        '{"x": 1,',
        "1 + 2",
        '"1 + 2"',
        "[1, 2]",
        '{"x": ' + "[" * 100_000,
    ],
)
def test_arguments_that_are_not_json_reach_the_agent_as_written_and_continue_the_conversation(
    arguments: str,
) -> None:
    async def play() -> None:
        text = '<tool_call>\n{"name": "calculator", "arguments": ' + arguments + "}\n</tool_call>"
        gconfig = GenerationHyperparameters(max_new_tokens=200_000, max_tokens=400_000)
        session, engine = make_session([text, "sorry"], gconfig=gconfig)
        choice = (await create(session, {"messages": [user("?")], "tools": [TOOL]}))["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert call["function"]["name"] == "calculator"
        as_written = arguments.strip('"')  # a JSON text of arguments is the text in it
        assert call["function"]["arguments"] == as_written
        assert session.tool_parse_errors == 1
        result = {"role": "tool", "tool_call_id": call["id"], "content": "error"}
        await create(session, {"messages": [user("?"), choice["message"], result], "tools": [TOOL]})
        assert (session.clean_turns, session.forks) == (2, 0)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


def test_300_levels_of_nesting_in_arguments_are_a_call_and_continue_the_conversation() -> None:
    async def play() -> None:
        nested = '{"x": ' + "[" * 300 + "]" * 300 + "}"
        session, _ = make_session(['<tool_call>{"name": "calculator", "arguments": ' + nested + "}</tool_call>", "ok"])
        message = answer_of(await create(session, {"messages": [user("?")], "tools": [TOOL]}))
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == json.loads(nested)
        result = {"role": "tool", "tool_call_id": call["id"], "content": "error"}
        await create(session, {"messages": [user("?"), message, result], "tools": [TOOL]})
        assert (session.tool_parse_errors, session.clean_turns, session.forks) == (0, 2, 0)
        deep: Any = {"type": "function", "function": {"name": "f", "parameters": json.loads(nested)}}
        schema = deep["function"]["parameters"]
        for fields in (
            {"tools": [deep]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
            {"guided_json": schema},
        ):
            with pytest.raises(RequestError, match="nested too deeply") as refused:
                await create(session, {"messages": [user("?")], **fields})
            assert refused.value.status == 400

    asyncio.run(play())


@pytest.mark.parametrize("schema", ["\x1e>", "[]", "3", "[" * 100_000])
@pytest.mark.parametrize("field", ["guided_json", "structured_outputs"])
def test_a_schema_as_text_must_be_one(field: str, schema: str) -> None:
    session, _ = make_session([])
    value = {"json": schema} if field == "structured_outputs" else schema
    with pytest.raises(RequestError, match="send a JSON schema, as an object or as its text") as refused:
        asyncio.run(create(session, {"messages": [user("?")], field: value}))
    assert refused.value.status == 400


def test_a_readable_call_beside_an_unreadable_one_is_a_call() -> None:
    session, _ = make_session(["so: " + CALL + "<tool_call>[]</tool_call>"])
    message = answer_of(asyncio.run(create(session, {"messages": [user("?")], "tools": [TOOL]})))
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["calculator"]
    assert message["content"] == "so: <tool_call>[]</tool_call>"
    assert session.tool_parse_errors == 1


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "calculator", "parameters": {"x": 123456789012345678901234567890}}', 1),
        (' [{"name": "calculator", "arguments": {}}, {"name": "calculator", "arguments": {}}]', 2),
        ('{"name": "unknown", "arguments": {}}', 0),
        ('{"answer": 3}', 0),
        ("{not json", 0),
        ('<tool_call>{"name": "calculator", "arguments": {}}', 1),
    ],
)
def test_bare_json_that_names_a_declared_tool_is_a_call(text: str, calls: int) -> None:
    session, _ = make_session([text])
    message = answer_of(asyncio.run(create(session, {"messages": [user("?")], "tools": [TOOL]})))
    assert len(message.get("tool_calls", [])) == calls
    assert session.counts()["tool_calls"] == calls
    assert session.tool_parse_errors == 0
    if "123456" in text:
        assert "123456789012345678901234567890" in message["tool_calls"][0]["function"]["arguments"]


def test_an_edited_history_is_forked_and_counted_and_a_new_conversation_is_not() -> None:
    async def play() -> None:
        session, _ = make_session(["a", "b", "c", "d", "e"])
        first = answer_of(await create(session, {"messages": [user("1")]}))
        await create(session, {"messages": [user("1"), first, user("2")]})
        assert (session.clean_turns, session.forks) == (2, 0)
        await create(session, {"messages": [user("1 edited"), first, user("2")]})
        assert (session.clean_turns, session.forks) == (2, 1)
        await create(session, {"messages": [user("another conversation")]})
        assert (session.clean_turns, session.forks) == (3, 1)
        await create(session, {"messages": [user("1"), first, user("2")], "tools": [TOOL]})  # rendered differently
        assert (session.clean_turns, session.forks) == (3, 2)
        assert len(session.history.export("concat")) == 4

    asyncio.run(play())


def test_white_space_null_and_argument_order_do_not_fork() -> None:
    async def play() -> None:
        call = '<tool_call>{"name": "calculator", "arguments": {"a": 1, "b": [2]}}</tool_call>'
        session, _ = make_session([" hi \n", call, "done"])
        messages: list[Any] = [user("1")]
        await create(session, {"messages": messages, "tools": [TOOL]})
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": "hi"}], "tool_calls": []},
            user("2"),
        ]
        message = answer_of(await create(session, {"messages": messages, "tools": [TOOL]}))
        function = {"name": "calculator", "arguments": '{ "b": [2],  "a": 1 }'}
        again = {"role": "assistant", "content": "", "tool_calls": [{"id": "other", "function": function}]}
        assert message["content"] is None
        messages += [again, {"role": "tool", "content": "3", "tool_call_id": "other"}]
        await create(session, {"messages": messages, "tools": [TOOL]})
        assert (session.clean_turns, session.forks, len(session.history.export("concat"))) == (3, 0, 1)

    asyncio.run(play())


def test_only_the_latest_conversations_are_kept_as_they_were_parsed_and_all_are_continued() -> None:
    async def play() -> None:
        session, _ = make_session(lambda _: "ok")
        first = [answer_of(await create(session, {"messages": [user(f"question {i}")]})) for i in range(9)][0]
        kept = [session.history.find([user(f"question {i}")]) is not None for i in range(9)]
        assert kept == [False] + [True] * 8
        await create(session, {"messages": [user("question 0"), first, user("and then?")]})
        assert (session.clean_turns, session.forks, len(session.history.export("concat"))) == (10, 0, 9)

    asyncio.run(play())


def test_concurrent_answers_to_one_history_are_branches_that_train_what_they_share_once() -> None:
    async def play() -> None:
        session, engine = make_session(lambda req: f"answer {len(engine.requests)}")
        first = answer_of(await create(session, {"messages": [user("1")]}))
        history = [user("1"), first]
        await asyncio.gather(*(create(session, {"messages": [*history, user(f"{i}")]}) for i in range(20)))
        assert (session.forks, len(session.history.export("concat"))) == (0, 20)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


def test_the_work_of_a_turn_does_not_grow_with_the_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    session, _ = make_session(["ok"] * 200)
    renderer = session.renderer
    encode = renderer._encode
    monkeypatch.setattr(renderer, "_encode", lambda text: rendered.append(len(text)) or encode(text))

    async def play() -> None:
        messages: list[Any] = []
        for turn in range(200):
            messages.append(user(f"turn {turn:03}"))
            messages.append(answer_of(await create(session, {"messages": messages})))

    asyncio.run(play())
    assert len(set(rendered[1:])) == 1


def test_an_ended_session_is_freed_without_a_garbage_collection() -> None:
    async def play() -> None:
        session, _ = make_session(["ok"] * 3)
        messages: list[Any] = []
        for turn in range(3):
            messages.append(user(f"{turn}"))
            messages.append(answer_of(await create(session, {"messages": messages})))
        assert (session.clean_turns, len(session.history.export("concat"))) == (3, 1)

    asyncio.run(play())  # warms up
    gc.collect()
    gc.disable()
    try:
        with asyncio.Runner() as runner:
            runner.run(play())
            assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("sends_reasoning", [True, False])
def test_reasoning_is_split_off_and_the_next_turn_continues_from_the_sampled_tokens(
    sends_reasoning: bool,
) -> None:
    async def play() -> None:
        session, engine = make_session(["<think>hm</think>\n\n3", "<think>hm</think>\n\n4", "5"], "qwen3")
        messages = [user("1")]
        for content in ("3", "4"):
            body = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
            message = answer_of(await create(session, body))
            assert message == {"role": "assistant", "content": content, "reasoning_content": "hm"}
            if not sends_reasoning:
                del message["reasoning_content"]
            messages = [*messages, message, user("2")]
        text = tokenizer("qwen3").decode(engine.requests[-1].input_ids)
        assert text.count("<think>hm</think>") == 1
        assert text.endswith("<think>\n\n</think>\n\n")
        if sends_reasoning:  # only with the latest answer, as many agents do
            del messages[1]["reasoning_content"]
        await create(session, {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
        assert (session.clean_turns, session.forks, len(session.history.export("concat"))) == (3, 0, 1)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


def test_edited_reasoning_is_a_fork_and_equal_texts_with_other_thoughts_are_branches() -> None:
    async def play() -> None:
        session, engine = make_session(["<think>a</think>3", "<think>b</think>3", "x", "y", "z"], "qwen3")
        answers = [answer_of(await create(session, {"messages": [user("1")]})) for _ in range(2)]
        for index, answer in enumerate(answers):
            await create(session, {"messages": [user("1"), answer, user("2")]})
            recorded = engine.responses[index]
            prefix = recorded.input_tokens + recorded.output_tokens
            assert engine.requests[-1].input_ids[: len(prefix)] == prefix
        assert session.forks == 0
        edited = {**answers[0], "reasoning_content": "c"}
        await create(session, {"messages": [user("1"), edited, user("2")]})
        assert (session.clean_turns, session.forks) == (4, 1)

    asyncio.run(play())


def test_a_template_that_leaves_out_answers_is_rendered_whole_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr(tokenizer("chatml"), "chat_template", template)

    async def play() -> None:
        session, engine = make_session(["a", "b"])
        first = answer_of(await create(session, {"messages": [user("1")]}))
        await create(session, {"messages": [user("1"), first, user("2")]})
        assert tokenizer().decode(engine.requests[-1].input_ids) == "12"
        assert (session.forks, len(session.history.export("concat"))) == (1, 2)
        assert trained(session) == sampled(engine)

    asyncio.run(play())


@pytest.mark.parametrize(("stops", "end"), [(True, ""), (False, "<|eot_id|>")])
def test_an_answer_is_ended_once_by_itself_or_by_the_template(stops: bool, end: str) -> None:
    eom = tokenizer("llama3").convert_tokens_to_ids("<|eom_id|>")

    async def play() -> None:
        gconfig = GenerationHyperparameters(stop_token_ids=[eom] if stops else None)
        session, engine = make_session([[200, 201, eom], "x"], "llama3", gconfig=gconfig)
        first = answer_of(await create(session, {"messages": [user("1")]}))
        assert "eom_id" not in first["content"]
        await create(session, {"messages": [user("1"), first, user("2")]})
        follow = engine.requests[-1].input_ids[len(engine.requests[0].input_ids) + 3 :]
        assert tokenizer("llama3").decode(follow).startswith(end + "<|start_header_id|>user")

    asyncio.run(play())


def test_the_run_decides_the_distribution_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()

    async def play() -> None:
        gconfig = GenerationHyperparameters(temperature=0.8, max_new_tokens=50, stop=["END"])
        session, engine = make_session(["a b END c", "a b END c", "xyz"], gconfig=gconfig)
        wishes = {"temperature": 0.1, "top_p": 0.5, "max_tokens": 99, "stop": "b", "seed": 3}
        text = answer_of(await create(session, {"messages": [user("1")], **wishes}))["content"]
        await create(session, {"messages": [user("2")], **wishes})
        used = engine.requests[0].gconfig
        assert (used.temperature, used.top_p, used.max_new_tokens, used.seed) == (0.8, 1.0, 50, 3)
        assert (used.stop, text) == (["END", "b"], "a ")
        assert used.stop_token_ids == [tokenizer().eos_token_id]
        await create(session, {"messages": [user("3")], "max_completion_tokens": 1, "temperature": 0.8})
        assert engine.requests[-1].gconfig.max_new_tokens == 1
        assert [r.message for r in caplog.records] == [
            "the agent sets temperature=0.1, top_p=0.5: ignored, because the trainer assumes the distribution of the "
            "run's gconfig"
        ]

        session, engine = make_session(["a"], gconfig=gconfig.new(greedy=True), agent_samples=True)
        await create(session, {"messages": [user("1")], **wishes, "top_k": -1})
        used = engine.requests[0].gconfig
        assert (used.effective_temperature, used.top_p, used.top_k) == (0.1, 0.5, None)

    asyncio.run(play())


@pytest.mark.parametrize("by", ["gconfig", "engine"])
def test_a_prompt_that_is_too_long_says_context_length_exceeded(by: str) -> None:
    gconfig = GenerationHyperparameters(max_tokens=4 if by == "gconfig" else 30000)
    error = ContextOverflowError("The input (9 tokens) is longer than the model's context length (4 tokens).")
    session, _ = make_session([error], gconfig=gconfig)
    with pytest.raises(RequestError) as refused:
        asyncio.run(create(session, {"messages": [user("much too long")]}))
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    assert session.error is None


def test_logprobs_are_given_when_asked() -> None:
    session, _ = make_session(["hello", "hello"])
    content = asyncio.run(create(session, {"messages": [user("1")], "logprobs": True}))["choices"][0]["logprobs"][
        "content"
    ]
    assert "".join(token["token"] for token in content) == "hello<|im_end|>"
    assert content[1]["logprob"] == -2 / 1024


def test_a_tokenizer_without_a_template_is_refused() -> None:
    class Bare:
        chat_template = None
        name_or_path = "some/base-model"

    with pytest.raises(ConfigError, match="some/base-model.*no chat template"):
        ChatRenderer(Bare())
