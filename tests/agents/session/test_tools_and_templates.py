"""Sessions with the templates of real families: tools are rendered or refused, and answers are parsed."""

from __future__ import annotations
import asyncio
import json
from pathlib import Path
from typing import Any
import pytest
from openai import AsyncOpenAI
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.agents.areal_openai import ArealOpenAI
from areal_lite.agents.parsers.tool_formats import TOOL_FORMATS
from areal_lite.agents.session.chat_answer import Piece
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_request import parse_chat_request
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.api import InferenceEngineConfig
from areal_lite.api.tensor_dict import tensor_dict_of
from areal_lite.api.turn_tree import trajectory_of
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.data.chat import hermes_tools
from tests.agents.scripted_engine import ScriptedEngine, create
from tests.fixtures.tool_templates import TOOL_FAMILIES, tool_tokenizer
from workflows.calculator import CALCULATOR, CalculatorAgent

QUESTION = {"role": "user", "content": "1 + 2?"}
CALLS = {
    "hermes": '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=calculator>\n<parameter=expression>\n1 + 2\n</parameter>\n</function>\n"
    "</tool_call>",
    "llama3": '<|python_tag|>{"name": "calculator", "parameters": {"expression": "1 + 2"}}',
    "mistral": '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "1 + 2"}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n"
    '{"expression": "1 + 2"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm45": "\n<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>1 + 2</arg_value>\n</tool_call>",
}


def make_session(family: str, answers: list[Any], **options: Any) -> tuple[ChatSession, ScriptedEngine]:
    engine = ScriptedEngine(answers)
    engine.tokenizer = tool_tokenizer(family)
    gconfig = options.pop("gconfig", GenerationHyperparameters())
    return ChatSession(engine, ChatRenderer(engine.tokenizer, **options), gconfig), engine  # type: ignore[arg-type]


def ask(session: ChatSession, *messages: Any, **fields: Any) -> dict[str, Any]:
    completion = asyncio.run(create(session, {"messages": list(messages), **fields}))
    return dict(completion["choices"][0]["message"])


def prompt_of(engine: ScriptedEngine) -> str:
    return str(engine.tokenizer.decode(engine.requests[-1].input_ids))


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_a_tool_round_of_every_family_is_one_sequence(family: str) -> None:
    """Also where the markers are special tokens: DeepSeek, Mistral, Llama."""
    in_system_prompt = not TOOL_FAMILIES[family].renders_tools
    call = CALLS["hermes" if in_system_prompt else TOOL_FAMILIES[family].parser]
    thought = "hm</think>" if family == "deepseek_r1" else ""  # its prompt opens the reasoning
    session, engine = make_session(
        family, [thought + call, thought + "It is 3."], tools_in_system_prompt=in_system_prompt
    )
    answer = ask(session, QUESTION, tools=[CALCULATOR])
    assert "Evaluates an arithmetic expression" in prompt_of(engine)
    (made,) = answer["tool_calls"]
    assert made["function"] == {"name": "calculator", "arguments": '{"expression": "1 + 2"}'}
    result = {"role": "tool", "tool_call_id": made["id"], "content": "3"}
    assert ask(session, QUESTION, answer, result, tools=[CALCULATOR])["content"] == "It is 3."
    recorded = engine.responses[0]
    prefix = recorded.input_tokens + recorded.output_tokens
    assert engine.requests[1].input_ids[: len(prefix)] == prefix
    assert (session.clean_turns, session.forks, session.tool_parse_errors) == (2, 0, 0)
    assert "3" in engine.tokenizer.decode(engine.requests[1].input_ids[len(prefix) :])


@pytest.mark.parametrize("family", TOOL_FAMILIES)
def test_calls_in_an_edited_history_are_rendered_by_every_family(family: str) -> None:
    """Also arguments that are not JSON, and templates that want the arguments as text."""
    in_system_prompt = family == "smollm2"
    session, engine = make_session(family, ["ok"] * 2, tools_in_system_prompt=in_system_prompt)
    for arguments in ('{"expression": "1 + 2"}', "1 + 2"):
        function = {"name": "calculator", "arguments": arguments}
        call = {"id": "abcdef123", "type": "function", "function": function}
        result = {"role": "tool", "tool_call_id": "abcdef123", "content": "3"}
        ask(session, QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result)
        assert "calculator" in prompt_of(engine)
        assert "1 + 2" in prompt_of(engine)


@pytest.mark.parametrize("family", [name for name, family in TOOL_FAMILIES.items() if not family.renders_tools])
def test_tools_that_the_template_does_not_render_are_refused_with_the_way_out(family: str) -> None:
    session, _ = make_session(family, ["hm</think>hi" if family == "deepseek_r1" else "hi"])
    with pytest.raises(RequestError, match="rollout.agents.tools_in_system_prompt to true") as refused:
        ask(session, QUESTION, tools=[CALCULATOR])
    assert (refused.value.status, refused.value.param) == (400, "tools")
    assert ask(session, QUESTION)["content"] == "hi"


def test_tools_in_the_system_prompt_have_hermes_form_from_the_first_to_the_last_message() -> None:
    session, engine = make_session("smollm2", ["x"], tools_in_system_prompt=True)
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "é"}'},
    }
    broken = {"id": "2", "type": "function", "function": {"name": "calculator", "arguments": "{1"}}
    messages = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "Wait.", "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": "error"},
    ]
    ask(session, *messages, tools=[CALCULATOR])
    system, rest = prompt_of(engine).split("<|im_end|>\n", 1)
    assert system.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(CALCULATOR, ensure_ascii=False)}\n</tools>" in system
    assert rest == (
        "<|im_start|>user\n1 + 2?<|im_end|>\n"
        '<|im_start|>assistant\nWait.\n<tool_call>\n{"name": "calculator", "arguments": {"expression": "é"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "calculator", "arguments": {1}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\nerror\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("in_system_prompt", "reward"), [(True, 1.0), (False, None)])
def test_the_calculator_runs_with_a_template_without_tools(
    in_system_prompt: bool, reward: float | None, tmp_path: Path
) -> None:
    tool_tokenizer("smollm2").save_pretrained(tmp_path)
    config = InferenceEngineConfig(tokenizer_path=str(tmp_path), agents={"tools_in_system_prompt": in_system_prompt})
    engine = ScriptedEngine([CALLS["hermes"], "It is 3."])
    engine.tokenizer = tool_tokenizer("smollm2")
    episode = AgentWorkflow(CalculatorAgent(), config).arun_episode(engine, {"question": "1 + 2?", "answer": "3"})  # type: ignore[arg-type]
    if reward is None:
        with pytest.raises(Exception, match="rollout.agents.tools_in_system_prompt"):
            asyncio.run(episode)
        return
    tensors = tensor_dict_of([trajectory_of(asyncio.run(episode), [])])
    assert tensors is not None
    assert tensors["rewards"].tolist() == [reward]


def test_the_check_renders_once_per_template(monkeypatch: pytest.MonkeyPatch) -> None:
    session, engine = make_session("qwen25", ["x"] * 20)
    hermes_tools._drops_tools.cache_clear()
    rendered = []
    render = engine.tokenizer.apply_chat_template
    monkeypatch.setattr(
        engine.tokenizer,
        "apply_chat_template",
        lambda *args, **kw: rendered.append(args) or render(*args, **kw),
    )
    for number in range(20):
        ask(session, {"role": "user", "content": f"{number}"}, tools=[CALCULATOR])
    assert len(rendered) == 20 + 2


def test_special_tokens_stay_out_of_the_text_unless_a_parser_reads_them() -> None:
    tokenizer = tool_tokenizer("mistral_v3")
    odd = tokenizer.convert_tokens_to_ids("[/INST]")
    ids = [odd, *tokenizer.encode(CALLS["mistral"], add_special_tokens=False), tokenizer.eos_token_id]
    assert tokenizer.convert_tokens_to_ids("[TOOL_CALLS]") in ids
    session, _ = make_session("mistral_v3", [ids, ids])
    answer = ask(session, QUESTION, tools=[CALCULATOR])
    assert (answer["content"], len(answer["tool_calls"]), len(answer["tool_calls"][0]["id"])) == (None, 1, 9)
    plain = ask(session, QUESTION)
    assert plain["content"] == CALLS["mistral"].removeprefix("[TOOL_CALLS]")
    shown, _ = make_session("mistral_v3", [ids], gconfig=GenerationHyperparameters(skip_special_tokens=False))
    assert ask(shown, QUESTION)["content"] == "[/INST]" + CALLS["mistral"]


@pytest.mark.parametrize(
    ("family", "kwargs", "text", "reasoning", "content"),
    [
        ("deepseek_r1", {}, "hm\n</think>\n\n3", "hm", "3"),
        ("deepseek_r1", {}, "cut", "cut", ""),
        ("deepseek_v31", {"thinking": True}, "hm</think>3", "hm", "3"),
        ("deepseek_v31", {}, "3", None, "3"),
        ("qwen3", {}, "<think>\nhm\n</think>\n\n3", "hm", "3"),
        ("qwen3", {"enable_thinking": False}, "3", None, "3"),
        ("qwen25", {}, "<think>hm</think>3", None, "<think>hm</think>3"),
    ],
)
def test_reasoning_is_split_as_the_template_prompts_for_it(
    family: str, kwargs: dict[str, Any], text: str, reasoning: str | None, content: str
) -> None:
    session, engine = make_session(family, [text, "x", "y"])
    fields = {"chat_template_kwargs": kwargs}
    answer = ask(session, QUESTION, **fields)
    assert (answer.get("reasoning_content"), answer["content"]) == (reasoning, content)
    again = {"role": "user", "content": "sure?"}
    ask(session, QUESTION, answer, again, **fields)
    answer.pop("reasoning_content", None)
    ask(session, QUESTION, answer, again, **fields)
    assert engine.requests[1].input_ids == engine.requests[2].input_ids
    assert (session.clean_turns, session.forks) == (3, 0)
    assert (
        engine.responses[0].output_tokens
        == engine.requests[1].input_ids[
            (start := len(engine.requests[0].input_ids)) : start + len(engine.responses[0].output_tokens)
        ]
    )


def test_an_edited_history_shows_reasoning_where_the_template_does() -> None:
    session, engine = make_session("qwen3", ["x", "y"])
    answer = {"role": "assistant", "content": "2", "reasoning_content": "hm"}
    result = {"role": "tool", "tool_call_id": "1", "content": "3"}
    ask(session, QUESTION, answer, result)
    assert "<think>\nhm\n</think>" in prompt_of(engine)
    ask(session, QUESTION, answer, {"role": "user", "content": "sure?"})
    assert "hm" not in prompt_of(engine)


@pytest.mark.parametrize(("parser", "reasoning"), [(None, None), ("qwen3", None), ("think", "hm")])
def test_areals_client_keeps_reasoning_in_the_content_unless_asked(parser: str | None, reasoning: str | None) -> None:
    async def run() -> Any:
        engine = ScriptedEngine(["<think>hm</think>3"])
        engine.tokenizer = tool_tokenizer("qwen3")
        client = ArealOpenAI(engine, engine.tokenizer, tool_call_parser="qwen25", reasoning_parser=parser)  # type: ignore[arg-type]
        return (await client.chat.completions.create(messages=[QUESTION])).choices[0].message

    message = asyncio.run(run())
    assert message.content == ("3" if reasoning else "<think>hm</think>3")
    assert getattr(message, "reasoning_content", None) == reasoning


def test_a_message_of_the_sdk_sent_back_with_its_reasoning_is_a_clean_turn() -> None:
    async def run() -> ChatSession:
        engine = ScriptedEngine(["<think>hm</think>3", "4"])
        engine.tokenizer = tool_tokenizer("qwen3")
        client = ArealOpenAI(engine, engine.tokenizer, reasoning_parser="think")  # type: ignore[arg-type]
        assert isinstance(client, AsyncOpenAI)
        answer = (await client.chat.completions.create(messages=[QUESTION])).choices[0].message
        await client.chat.completions.create(messages=[QUESTION, answer, QUESTION])
        return client.session

    session = asyncio.run(run())
    assert (session.clean_turns, session.forks) == (2, 0)


@pytest.mark.parametrize("family", TOOL_FAMILIES)
@pytest.mark.parametrize(
    "text", ["Let me see. {0}", "{0}", "No tool, 1 < 2.", '{{"name": "calculator", "arguments": {{}}}}']
)
def test_streamed_text_is_the_content_without_reasoning_and_calls(family: str, text: str) -> None:
    parser = TOOL_FAMILIES[family].parser
    text = ("hm</think>\n" if family == "deepseek_r1" else "<think>hm</think>\n") + text.format(CALLS[parser])
    session, _ = make_session(family, [text], tools_in_system_prompt=True, tool_parser=parser, reasoning_parser="think")
    pieces: list[Piece] = []
    request = parse_chat_request({"messages": [QUESTION], "tools": [CALCULATOR]})
    (answer,) = asyncio.run(session.answer(request, "id", on_text=lambda _, piece: pieces.append(piece)))
    assert "".join(piece.text for piece in pieces if not piece.is_reasoning) == (answer.message["content"] or "")
    assert "".join(piece.text for piece in pieces if piece.is_reasoning) == "hm"
    assert answer.message["reasoning_content"] == "hm"
    is_call = CALLS[parser] in text or (text.endswith("{}}") and TOOL_FORMATS[parser].bare_json)
    assert answer.finish_reason == ("tool_calls" if is_call else "stop")


@pytest.mark.parametrize("family", ["mistral_v3", "qwen3_coder", "deepseek_r1"])
def test_a_forced_call_is_json_in_every_format_and_has_no_reasoning(family: str) -> None:
    bare = '{"name": "calculator", "arguments": {"expression": "1"}}'
    session, _ = make_session(family, [bare], tools_in_system_prompt=True, tool_parser=TOOL_FAMILIES[family].parser)
    answer = ask(session, QUESTION, tools=[CALCULATOR], tool_choice="required")
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["calculator"]
    assert "reasoning_content" not in answer
