"""Gemini's ``POST /v1beta/models/NAME:generateContent``, ``:streamGenerateContent`` and ``:countTokens``."""

from collections.abc import Sequence
from typing import Any
from areal_lite.agents.doors.api import RAW_ARGUMENTS, Api, arguments_object, event
from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.request_fields import RequestError, json_bytes, short, typed, wrong

_STATUSES = {
    400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT", 503: "UNAVAILABLE",
}  # fmt: skip
_OPTIONS = {
    "maxOutputTokens": "max_tokens", "stopSequences": "stop", "candidateCount": "n", "temperature": "temperature",
    "topP": "top_p", "topK": "top_k", "seed": "seed", "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}  # fmt: skip
"""Keys of ``generationConfig``, and their names in a chat completion."""
_FORMATS = {"responseMimeType", "responseSchema", "responseJsonSchema"}
_IGNORED = {"thinkingConfig", "responseModalities", "mediaResolution"}
_CHOICES = {"AUTO": "auto", "NONE": "none", "ANY": "required", "VALIDATED": "auto"}


class GenerateContent(Api):
    """Candidates with parts; the events of a stream have pieces of text, the last ones calls and the reason."""

    id_prefix = ""
    as_chat = {"labels": "metadata"}
    other_fields = {
        *("contents", "systemInstruction", "tools", "toolConfig", "generationConfig"),
        *("safetySettings", "cachedContent", "model"),
    }
    streams = False

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        config = _object("generationConfig", body.get("generationConfig"))
        if unknown := config.keys() - _OPTIONS.keys() - _FORMATS - _IGNORED:
            name = f"generationConfig.{sorted(unknown)[0]}"
            raise RequestError(f"unknown field {short(name)}: leave it out", param=name[:80])
        choosing = _object("toolConfig", body.get("toolConfig")).get("functionCallingConfig")
        choosing = _object("functionCallingConfig", choosing)
        mode, names = choosing.get("mode", "AUTO"), _list("allowedFunctionNames", choosing.get("allowedFunctionNames"))
        if not isinstance(mode, str) or mode not in _CHOICES or len(names) > (mode == "ANY"):
            raise wrong("functionCallingConfig", choosing, "send mode AUTO, ANY or NONE, and with ANY at most one name")
        forced = {"type": "function", "function": {"name": names[0]}} if names else _CHOICES[mode]
        tools: list[dict[str, Any]] = []
        for given in _list("tools", body.get("tools")):
            if not isinstance(given, dict) or "functionDeclarations" not in given:
                raise wrong("tools", given, "send functionDeclarations; tools that Google runs are not served")
            tools += map(_tool, _list("functionDeclarations", given["functionDeclarations"]))
        return {
            "messages": _messages(body),
            "tools": tools,
            "tool_choice": forced if tools else None,
            "response_format": _format(config),
            "stream": self.streams,
            **{name: config[key] for key, name in _OPTIONS.items() if config.get(key) is not None},
        }

    def start(self) -> bytes:
        return b""  # the first event has text

    def text(self, index: int, piece: Piece) -> bytes:
        part = {"text": piece.text, **({"thought": True} if piece.is_reasoning else {})}
        return event(self._head() | {"candidates": [_candidate(index, [part])]})

    def end(self, answers: Sequence[ChatAnswer]) -> bytes:
        ends = [_candidate(k, _calls(one.message), one.finish_reason) for k, one in enumerate(answers)]
        return event(self._head() | {"candidates": ends, "usageMetadata": _usage(answers)})

    def reply(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        whole = [_candidate(k, _parts(one.message), one.finish_reason) for k, one in enumerate(answers)]
        return self._head() | {"candidates": whole, "usageMetadata": _usage(answers)}

    def _head(self) -> dict[str, Any]:
        return {"responseId": self.id, "modelVersion": self.request.options.model}

    @staticmethod
    def error(error: RequestError) -> dict[str, Any]:
        status = _STATUSES.get(error.status, "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": error.status, "message": error.message, "status": status}}


class StreamGenerateContent(GenerateContent):
    streams = True


class CountTokens(GenerateContent):
    """A body of the prompt alone, or of a whole request in ``generateContentRequest``."""

    other_fields = {*GenerateContent.other_fields, "generateContentRequest"}

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        return super().chat(_object("generateContentRequest", body.get("generateContentRequest")) or body)


def _candidate(index: int, parts: list[dict[str, Any]], finish_reason: str | None = None) -> dict[str, Any]:
    ended = {} if finish_reason is None else {"finishReason": "MAX_TOKENS" if finish_reason == "length" else "STOP"}
    return {"content": {"role": "model", "parts": parts}, "index": index, **ended}


def _usage(answers: Sequence[ChatAnswer]) -> dict[str, int]:
    prompt = answers[0].response.input_len
    sampled = sum(answer.response.output_len for answer in answers)
    return {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    thought, text = message.get("reasoning_content"), message["content"]
    parts = [{"text": thought, "thought": True}] if thought else []
    return [*parts, *([{"text": text}] if text else []), *_calls(message)]


def _calls(message: dict[str, Any]) -> list[dict[str, Any]]:
    parts = []
    for call in message.get("tool_calls") or ():
        name, given = call["function"]["name"], arguments_object(call["function"]["arguments"])
        parts.append({"functionCall": {"id": call["id"], "name": name, "args": given}})
    return parts


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    system = body.get("systemInstruction")
    parts = [system] if isinstance(system, str) else _object("systemInstruction", system).get("parts")
    texts = [_part(part, "systemInstruction") for part in _list("systemInstruction.parts", parts)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": texts}] if texts else []
    waiting: list[tuple[str, Any]] = []
    """Id and name of the calls of the last answer that have no result yet."""
    for index, content in enumerate(_list("contents", body.get("contents"))):
        where = f"contents[{index}]"
        given = _object(where, content)
        parts, role = _list(f"{where}.parts", given.get("parts")), given.get("role", "user")
        if role == "model":
            messages.append(_answer(parts, where, waiting))
        elif role in ("user", "function"):
            others = []
            for part in parts:
                result = part.get("functionResponse") if isinstance(part, dict) else None
                if result is None:
                    others.append(_part(part, where))
                else:
                    messages.append(_result(_object(f"{where}.functionResponse", result), waiting))
            messages += [{"role": "user", "content": others}] if others else []
        else:
            raise wrong(f"{where}.role", role, "send user or model")
    return messages


def _answer(parts: list[Any], where: str, waiting: list[tuple[str, Any]]) -> dict[str, Any]:
    texts: dict[bool, list[str]] = {True: [], False: []}
    calls = []
    waiting.clear()
    for part in parts:
        if isinstance(part, dict) and "functionCall" in part:
            call = _object(f"{where}.functionCall", part["functionCall"])
            given = _object(f"{where}.functionCall.args", call.get("args"))
            waiting.append((str(call.get("id") or f"call_{len(waiting)}"), call.get("name")))
            function = {"name": call.get("name"), "arguments": given.get(RAW_ARGUMENTS, given)}
            calls.append({"type": "function", "id": waiting[-1][0], "function": function})
        else:
            if (text := _part(part, where).get("text")) is None:
                raise RequestError(f"{where} is an answer with an image: models answer with text", param=where)
            texts[isinstance(part, dict) and part.get("thought") is True].append(text)
    reasoning = {"reasoning_content": "".join(texts[True])} if texts[True] else {}
    return {"role": "assistant", "content": "".join(texts[False]), "tool_calls": calls, **reasoning}


def _result(result: dict[str, Any], waiting: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the message of a function's result; clients may leave out the id of its call."""
    name, given = result.get("name"), result.get("response")
    same_id = [one for one in waiting if one[0] == result.get("id")]
    matching: list[tuple[Any, Any]] = same_id or [one for one in waiting if one[1] == name]
    if matching:
        waiting.remove(matching[0])
    only = given.get("output", given.get("result")) if isinstance(given, dict) and len(given) == 1 else None
    content = only if isinstance(only, str) else json_bytes(given).decode()
    return {"role": "tool", "tool_call_id": (matching or [(result.get("id"), name)])[0][0], "content": content}


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    data = part.get("inlineData") if isinstance(part, dict) else None
    if not isinstance(data, dict):
        raise RequestError(f"{where} has the part {short(part)}: send text, inlineData or a function's", param=where)
    return {"type": "image_url", "image_url": {"url": f"data:{data.get('mimeType')};base64,{data.get('data')}"}}


def _tool(declared: Any) -> dict[str, Any]:
    given = _object("functionDeclarations", declared)
    schema = given.get("parametersJsonSchema") or _json_schema(given.get("parameters")) or {"type": "object"}
    function = {"name": given.get("name"), "description": given.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


def _json_schema(schema: Any) -> Any:
    """Return Google's schema, whose types are in capitals and may be nullable, as a JSON schema."""
    if isinstance(schema, list):
        return [_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _json_schema(value) for name, value in schema.items()}
    if isinstance(kind := schema.get("type"), str):
        found["type"] = [kind.lower(), "null"] if schema.get("nullable") is True else kind.lower()
    return found


def _format(config: dict[str, Any]) -> dict[str, Any] | None:
    schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema"))
    kind = config.get("responseMimeType", "text/plain")
    if kind not in ("text/plain", "application/json") and schema is None:
        raise wrong("responseMimeType", kind, "send text/plain or application/json")
    if schema is not None:
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    return {"type": "json_object"} if kind == "application/json" else None


def _object(name: str, value: Any) -> dict[str, Any]:
    return typed(name, value, dict, "send an object") or {}


def _list(name: str, value: Any) -> list[Any]:
    return typed(name, value, list, "send a list") or []
