"""Anthropic's Messages: ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from collections.abc import Sequence
from typing import Any
import orjson
from areal_lite.agents.doors.api import RAW_ARGUMENTS, Api, arguments_object, event
from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.request_fields import RequestError, joined_text, short, typed, wrong

_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
}  # fmt: skip


class Messages(Api):
    """A message; its stream has message_start, the blocks one after another, message_delta and message_stop."""

    id_prefix = "msg_"
    as_chat = {
        "model": "model", "max_tokens": "max_tokens", "stop_sequences": "stop", "temperature": "temperature",
        "top_p": "top_p", "top_k": "top_k", "stream": "stream", "metadata": "metadata",
    }  # fmt: skip
    other_fields = {
        *("messages", "system", "tools", "tool_choice", "output_config", "output_format"),
        *("service_tier", "thinking", "cache_control", "context_management"),
    }
    _block = -1
    _kind = ""
    """Type of the open block; empty if none is open."""

    def start(self) -> bytes:
        usage = {"input_tokens": 0, "output_tokens": 0}  # the prompt's length is in message_delta
        stop = {"stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**self._head(), "content": [], **stop, "usage": usage})

    def text(self, index: int, piece: Piece) -> bytes:
        kind = "thinking" if piece.is_reasoning else "text"
        head = b""
        if kind != self._kind:
            block = {"type": kind, kind: ""}
            head = self._close() + self._open({**block, "signature": ""} if piece.is_reasoning else block)
        return head + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def end(self, answers: Sequence[ChatAnswer]) -> bytes:
        (answer,) = answers
        parts = [self._close()]
        for block in _blocks(answer.message):
            if block["type"] == "tool_use":
                parts += [
                    self._open({**block, "input": {}}),
                    self._delta({"type": "input_json_delta", "partial_json": orjson.dumps(block["input"]).decode()}),
                    self._close(),
                ]
            elif self._block < 0:  # an empty answer
                parts += [self._open(block), self._close()]
        parts += [_event("message_delta", delta=_stop(answer), usage=_usage(answer)), _event("message_stop")]
        return b"".join(parts)

    @staticmethod
    def error(error: RequestError) -> dict[str, Any]:
        kind = "api_error" if error.status >= 500 else "invalid_request_error"
        return {"type": "error", "error": {"type": _ERROR_TYPES.get(error.status, kind), "message": error.message}}

    def error_event(self, error: RequestError) -> bytes:
        return event(self.error(error), "error")

    def _open(self, block: dict[str, Any]) -> bytes:
        self._block += 1
        self._kind = block["type"]
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        self._kind = ""
        return _event("content_block_stop", index=self._block)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        system = joined_text(body.get("system"), "system")
        tools = typed("tools", body.get("tools"), list, "send a list of tools") or []
        choice = typed("tool_choice", body.get("tool_choice"), dict, "send an object with a type")
        config = typed("output_config", body.get("output_config"), dict, "send an object with format") or {}
        head = [{"role": "system", "content": system}] if body.get("system") else []
        messages = _messages(body.get("messages"))
        begun = [m for m in messages[-1:] if m["role"] == "assistant" and m.keys() == {"role", "content"}]
        return {
            "messages": head + messages,
            "continue_final_message": any(message["content"] for message in begun),
            "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)],
            "tool_choice": _tool_choice(choice) if choice else None,
            "response_format": config.get("format") or body.get("output_format"),  # the second one in beta versions
        }

    def reply(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        (answer,) = answers
        return {**self._head(), "content": _blocks(answer.message), **_stop(answer), "usage": _usage(answer)}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.request.options.model}


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {"input_tokens": answer.response.input_len, "output_tokens": answer.response.output_len}


def _stop(answer: ChatAnswer) -> dict[str, Any]:
    reason = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[answer.finish_reason]
    if answer.stopped_by is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stopped_by if reason == "stop_sequence" else None}


def _blocks(message: dict[str, Any]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if thinking := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thinking, "signature": ""})
    calls = message.get("tool_calls") or []
    if message["content"] or not calls:
        blocks.append({"type": "text", "text": message["content"] or ""})
    for call in calls:
        function = call["function"]
        given = arguments_object(function["arguments"])
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return blocks


def _messages(raw: Any) -> list[dict[str, Any]]:
    if not isinstance(raw, list) or not raw:
        raise wrong("messages", raw, "send a list of at least one")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(raw):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in ("user", "assistant", "system"):
            raise wrong(f"{where}.role", role, "send user or assistant")
        if not isinstance(content := message.get("content"), str | list):
            raise wrong(f"{where}.content", content, "send a string or a list of blocks")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages += _blocks_as_chat(blocks, role, where)
    return messages


def _blocks_as_chat(blocks: list[Any], role: str, where: str) -> list[dict[str, Any]]:
    """Return a message's blocks as chat messages: tool results first, then one with all else."""
    is_assistant = role == "assistant"
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    other: dict[str, Any] = {}
    for block in blocks:
        if not isinstance(block, dict):
            raise RequestError(f"{where} has the block {short(block)}: send an object with a type", param=where)
        match str(block.get("type")):
            case "text":
                texts.append(_part(block))
            case "image" if not is_assistant:
                texts.append(_part(block))
            case "tool_result" if not is_assistant:
                if isinstance(content := block.get("content"), list):
                    content = [_part(part) for part in content]
                results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
            case "thinking" if is_assistant:
                other["reasoning_content"] = str(block.get("thinking") or "")
            case "redacted_thinking" if is_assistant:
                pass
            case "tool_use" if is_assistant:
                given = block.get("input") or {}
                raw = given.get(RAW_ARGUMENTS) if isinstance(given, dict) else None
                function = {"name": block.get("name"), "arguments": given if raw is None else raw}
                call = {"type": "function", "id": block.get("id"), "function": function}
                other.setdefault("tool_calls", []).append(call)
            case kind:
                problem = f"{where} has a block of type {short(kind)}: only text is supported there"
                raise RequestError(problem, param=where)
    if is_assistant:
        return [{"role": role, "content": "".join(str(block.get("text") or "") for block in texts), **other}]
    return [*results, {"role": role, "content": texts}] if texts else results


def _part(block: Any) -> Any:
    """Return a block of text or an image as a part of a chat completion, another one as it is."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return {"type": "text", "text": block.get("text")}  # without marks of caching, which clients move
    if kind != "image":
        return block
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    url = source.get("url")
    if source.get("type") == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": url}


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom") or "name" not in tool:
        raise wrong(where, tool, "send name, description and input_schema; tools that Anthropic runs are not served")
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise RequestError(f"tool_choice.type is {short(kind)}: send auto, any, tool or none", param="tool_choice")
    return "required" if kind == "any" else kind
