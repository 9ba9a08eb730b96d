"""Gemini's API: what it asks for reaches the model as a chat, and the answer comes back in its form."""

from __future__ import annotations
import json
from typing import Any
import pytest
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.session.chat_session import ChatSession
from tests.agents.doors.test_agent_apis import CALL, DOORS, one_sequence, openai_client, play
from tests.agents.scripted_engine import ScriptedEngine

DECLARED = {
    "name": "add",
    "description": "adds",
    "parameters": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
}
TOOLS = {"tools": [{"functionDeclarations": [DECLARED]}], "systemInstruction": {"parts": [{"text": "be kind"}]}}


def said(text: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "parts": [{"text": text}]}


async def post(access: AgentAccess, door: str, verb: str, body: Any, **headers: str) -> Any:
    client = access.http_client if door == "transport" else openai_client(access, door)._client
    url = f"{access.anthropic_base_url}/v1beta/models/gemini:{verb}"
    return await client.post(url, json=body, headers={"x-goog-api-key": access.api_key} | headers)


def events(reply: Any) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n") if line]


@DOORS
def test_tools_and_text_streamed_and_whole_are_one_conversation(door: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        body: dict[str, Any] = {"contents": [said("hello")], "generationConfig": {"maxOutputTokens": 64}, **TOOLS}
        counted = (await post(access, door, "countTokens", {"generateContentRequest": body})).json()
        first = (await post(access, door, "generateContent", body)).json()
        (candidate,) = first["candidates"]
        assert counted == {"totalTokens": len(engine.requests[0].input_ids)}
        assert first["usageMetadata"]["promptTokenCount"] == counted["totalTokens"]
        assert first["usageMetadata"]["candidatesTokenCount"] == engine.responses[0].output_len
        text, called = candidate["content"]["parts"]
        call = called["functionCall"]
        assert (text, candidate["finishReason"], call["args"]) == ({"text": "Hm."}, "STOP", {"a": 1, "b": [2, "ü"]})
        del call["id"]  # as SDKs may
        result = {"functionResponse": {"name": "add", "response": {"output": "3"}}}
        body["contents"] += [candidate["content"], {"role": "user", "parts": [result]}]
        streamed = events(await post(access, door, "streamGenerateContent?alt=sse", body))
        texts = [part["text"] for one in streamed for part in one["candidates"][0]["content"]["parts"]]
        assert "".join(texts) == "It is 3, I think." and len(texts) > 2
        assert streamed[-1]["candidates"][0]["finishReason"] == "STOP"
        assert streamed[-1]["usageMetadata"]["candidatesTokenCount"] == engine.responses[1].output_len
        body["contents"] += [said("It is 3, I think.", "model"), said("again")]
        streamed = events(await post(access, door, "streamGenerateContent?alt=sse", body))
        (called,) = streamed[-1]["candidates"][0]["content"]["parts"]
        assert called["functionCall"]["name"] == "add"
        one_sequence(session, engine)

    play([f"Hm.\n{CALL}", "It is 3, I think.", f"Hm.\n{CALL}"], steps)


def test_options_reach_the_engine_by_their_meaning() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        config = {
            **{"maxOutputTokens": 5, "stopSequences": ["x"], "temperature": 0.5, "topP": 0.9, "topK": 4, "seed": 3},
            **{"candidateCount": 2, "responseMimeType": "application/json"},
            "responseSchema": {"type": "OBJECT", "properties": {"a": {"type": "INTEGER"}}},
        }
        reply = await post(
            access, "transport", "generateContent", {"contents": [said("hi")], "generationConfig": config}
        )
        assert [one["index"] for one in reply.json()["candidates"]] == [0, 1]
        gconfig = engine.requests[0].gconfig
        assert (gconfig.max_new_tokens, gconfig.stop, gconfig.temperature, gconfig.top_p, gconfig.top_k) == (
            5, ["x"], 0.5, 0.9, 4,
        )  # fmt: skip
        schema = json.loads(gconfig.json_schema or "")
        assert schema["properties"] == {"a": {"type": "integer"}}
        forced = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["add"]}}
        await post(access, "transport", "generateContent", {"contents": [said("hi")], "toolConfig": forced, **TOOLS})
        assert '"add"' in (engine.requests[-1].gconfig.json_schema or "")
        assert "be kind" in engine.tokenizer.decode(engine.requests[-1].input_ids)

    play(['{"a": 1}', '{"a": 1}', '{"name": "add", "arguments": {"a": 1}}'], steps)


def test_a_nullable_property_may_be_null() -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        schema = {
            "type": "OBJECT",
            "properties": {"type": {"type": "INTEGER", "nullable": True}, "b": {"type": "STRING"}},
        }
        config = {"responseMimeType": "application/json", "responseSchema": schema}
        await post(access, "transport", "generateContent", {"contents": [said("x")], "generationConfig": config})
        found = json.loads(engine.requests[0].gconfig.json_schema or "")["properties"]
        assert (found["type"]["type"], found["b"]) == (["integer", "null"], {"type": "string"})

    play(["{}"], steps)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "messages"),
        ({"contents": 3}, "contents is 3"),
        ({"contents": [3]}, "contents[0] is 3"),
        ({"contents": [said("x", "system")]}, "contents[0].role is 'system': send user or model"),
        ({"contents": [{"parts": [{"fileData": {}}]}]}, "contents[0] has the part {'fileData': {}}"),
        ({"contents": [{"role": "model", "parts": [{"functionCall": 3}]}]}, "functionCall is 3"),
        ({"contents": [{"role": "model", "parts": [{"inlineData": {}}]}]}, "models answer with text"),
        ({"contents": [{"parts": [{"functionResponse": 3}]}]}, "functionResponse is 3"),
        ({"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "x"}}]}]}, "image"),
        ({"contents": [said("x")], "tools": [{"googleSearch": {}}]}, "tools that Google runs are not served"),
        ({"contents": [said("x")], "generationConfig": {"topM": 1}}, "unknown field 'generationConfig.topM'"),
        ({"contents": [said("x")], "toolConfig": {"functionCallingConfig": {"mode": []}}}, "send mode AUTO"),
        *(
            ({"contents": [said("x")], "toolConfig": {"functionCallingConfig": choice}}, "with ANY at most one name")
            for choice in (
                {"mode": "NONE", "allowedFunctionNames": ["add"]},
                {"allowedFunctionNames": ["add"]},
                {"mode": "ANY", "allowedFunctionNames": ["add", "b"]},
            )
        ),
        ({"contents": [said("x")], "generationConfig": {"responseMimeType": "text/x"}}, "send text/plain"),
        ({"contents": [said("x")], "generationConfig": {"maxOutputTokens": 0}}, "max_tokens"),
        ({"contents": [said("x")], "wrong": 1}, "unknown field 'wrong'"),
    ],
)
def test_a_bad_body_gets_googles_error_with_the_field(body: Any, says: str) -> None:
    async def steps(access: AgentAccess, session: ChatSession, engine: ScriptedEngine) -> None:
        reply = await post(access, "transport", "generateContent", body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT") and says in error["message"]
        wrong_key = await post(access, "transport", "generateContent", body, **{"x-goog-api-key": "al_x"})
        assert (wrong_key.status_code, wrong_key.json()["error"]["status"]) == (401, "UNAUTHENTICATED")

    play([], steps)
