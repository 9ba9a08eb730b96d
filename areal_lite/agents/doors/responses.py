"""OpenAI's Responses: ``POST /v1/responses``, and what a session has stored below ``/v1/responses/ID``."""

import time
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs
from areal_lite.agents.doors.api import Api, event
from areal_lite.agents.parsers.call_json import dump_json
from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError, short, typed, wrong

_IN_NAMESPACE = "::"
"""Between a namespace and a function's name, which have no colon, where the model sees both as one name."""
_TEXTS = ("input_text", "output_text", "text")


class Responses(Api):
    """A response; its stream has response.created, the output items one after another, and response.completed."""

    id_prefix = "resp_"
    as_chat = {
        "model": "model", "max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p",
        "stream": "stream", "tool_choice": "tool_choice", "chat_template_kwargs": "chat_template_kwargs",
        "stop": "stop", "seed": "seed", "top_k": "top_k", "metadata": "metadata",
    }  # fmt: skip
    other_fields = {
        *("input", "instructions", "tools", "text", "previous_response_id", "background", "truncation"),
        *("include", "max_tool_calls", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention"),
        *("reasoning", "safety_identifier", "service_tier", "store", "stream_options", "user", "context_management"),
        *("client_metadata", "top_logprobs"),
    }

    def __init__(self, body: bytes, session: ChatSession) -> None:
        super().__init__(body, session)
        self._number = -1
        self._item: dict[str, Any] = {}
        """The open item of text or reasoning; empty if none is open."""
        self._output: list[dict[str, Any]] = []

    def start(self) -> bytes:
        response = self._response(None, [])
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def text(self, index: int, piece: Piece) -> bytes:
        new = _reasoning("") if piece.is_reasoning else _message("")
        head = b""
        if self._item.get("type") != new["type"]:
            head = self._close()
            self._item = new
            opened = {**new, "content": []}
            head += self._event("response.output_item.added", output_index=len(self._output), item=opened)
            head += self._event("response.content_part.added", **self._part(), part=new["content"][0])
        part = self._item["content"][0]
        part["text"] += piece.text
        return head + self._event(f"response.{part['type']}.delta", **self._part(), delta=piece.text, logprobs=[])

    def end(self, answers: Sequence[ChatAnswer]) -> bytes:
        (answer,) = answers
        parts = [self._close()]
        items = _items(answer.message)
        for item in items if not self._output else [i for i in items if i["type"] == "function_call"]:
            output = {"output_index": len(self._output)}
            opened = {**item, "arguments": ""} if item["type"] == "function_call" else item
            parts.append(self._event("response.output_item.added", **output, item=opened))
            if item["type"] == "function_call":
                call = {**output, "item_id": item["id"]}
                arguments = item["arguments"]
                done = {**call, "name": item["name"], "arguments": arguments}
                parts.append(self._event("response.function_call_arguments.delta", **call, delta=arguments))
                parts.append(self._event("response.function_call_arguments.done", **done))
            parts.append(self._event("response.output_item.done", **output, item=item))
            self._output.append(item)
        response = self.session.responses[self.id] = self._response(answer, self._output)
        parts.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(parts)

    def error_event(self, error: RequestError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _close(self) -> bytes:
        if not self._item:
            return b""
        item, opened = self._item, self._part()
        part = item["content"][0]
        events = self._event(f"response.{part['type']}.done", **opened, text=part["text"], logprobs=[])
        events += self._event("response.content_part.done", **opened, part=part)
        events += self._event("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._item = {}
        return events

    def _part(self) -> dict[str, Any]:
        return {"item_id": self._item["id"], "output_index": len(self._output), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number, **fields}, kind)

    def chat(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("background"):
            raise RequestError("background is not served: leave it out and wait for the response", param="background")
        if body.get("truncation") not in (None, "disabled", "auto"):
            raise wrong("truncation", body["truncation"], "send 'disabled'")
        history = self._history(body.get("previous_response_id"))
        self._instructions = typed("instructions", body.get("instructions"), str, "send a string")
        tools = typed("tools", body.get("tools"), list, "send a list of functions") or []
        text = typed("text", body.get("text"), dict, "send an object with format") or {}
        head = [{"role": "system", "content": self._instructions}] if self._instructions else []
        return {
            "messages": [*head, *history, *_messages(body.get("input"))],
            "tools": [one for index, tool in enumerate(tools) for one in _functions(tool, f"tools[{index}]")],
            "response_format": text.get("format"),
        }

    def _history(self, previous: Any) -> list[dict[str, Any]]:
        """Return the messages of an earlier response without its instructions, and its answer."""
        if previous is None:
            return []
        if not isinstance(previous, str) or previous not in self.session.responses:
            raise _no_response(previous, "previous_response_id")
        asked, has_instructions = self.session.interactions[previous], self.session.responses[previous]["instructions"]
        return [*asked.messages[bool(has_instructions) :], *asked.output_message_list]

    def reply(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        (answer,) = answers
        response = self.session.responses[self.id] = self._response(answer, _items(answer.message))
        return response

    def _response(self, answer: ChatAnswer | None, output: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the response object; without an answer it is in progress."""
        usage = None
        status = "in_progress"
        if answer is not None:
            prompt, sampled = answer.response.input_len, answer.response.output_len
            status = "incomplete" if answer.finish_reason == "length" else "completed"
            usage = {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": sampled,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + sampled,
            }
        return {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": self._instructions,
            "model": self.request.options.model,
            "output": output,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in self.request.tools or ()],
            "metadata": {},
            "usage": usage,
        }


def stored_response(method: str, path: str, query: str, session: ChatSession) -> dict[str, Any]:
    """Answer ``GET ID``, ``DELETE ID`` and ``GET ID/input_items`` of the session's responses."""
    name, _, part = path.partition("/")
    if name not in session.responses or part not in ("", "input_items"):
        raise _no_response(path, None)
    if method == "DELETE" and not part:
        del session.responses[name]
        return {"id": name, "object": "response", "deleted": True}
    if method != "GET":
        raise RequestError(f"{method[:20]} is not served there: use GET, or DELETE of a response", status=405)
    asked = parse_qs(query)
    if not part:
        if asked.get("stream") == ["true"]:
            raise RequestError("a stored response is not streamed: leave stream out", param="stream")
        return session.responses[name]
    messages = session.interactions[name].messages[bool(session.responses[name]["instructions"]) :]
    items = [item for message in messages for item in _items(message)]
    items = [{"status": "completed", **item, "id": f"{name}_{index}"} for index, item in enumerate(items)]
    if asked.get("order") != ["asc"]:
        items.reverse()
    first, last = (items[place]["id"] if items else None for place in (0, -1))
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": False}


def _no_response(name: object, param: str | None) -> RequestError:
    where = f"{param} is {short(name)}" if param else short(name)
    return RequestError(f"{where}: this episode has no such response", status=404, param=param, code="not_found")


def _items(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message of a chat completion as items; of an image, that there was one."""
    content = message["content"] or ""
    if message["role"] != "assistant":
        image = {"type": "input_image", "detail": "auto", "image_url": None, "file_id": None}
        given = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts = [{"type": "input_text", "text": part["text"]} if part["type"] == "text" else image for part in given]
        if message["role"] != "tool":
            return [{"type": "message", "role": message["role"], "content": parts}]
        output = content if isinstance(content, str) else parts
        return [{"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": output}]
    items = [_reasoning(thought)] if (thought := message.get("reasoning_content")) else []
    calls = message.get("tool_calls") or []
    if content or not calls:
        items.append(_message(content))
    for call in calls:
        namespace, _, name = call["function"]["name"].rpartition(_IN_NAMESPACE)
        arguments = call["function"]["arguments"]
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.get("id"),
            "name": name,
            "arguments": arguments if isinstance(arguments, str) else dump_json(arguments or {}),
            "status": "completed",
        }
        items.append({**item, "namespace": namespace} if namespace else item)
    return items


def _message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    name = f"msg_{uuid.uuid4().hex}"
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def _reasoning(text: str) -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": text}
    return {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "content": [part]}


def _messages(raw: Any) -> list[dict[str, Any]]:
    """Return input items as chat messages; one answer's text, reasoning and calls are one message."""
    if isinstance(raw, str):
        return [{"role": "user", "content": raw}]
    if not isinstance(raw, list):
        raise wrong("input", raw, "send a string or a list of items")
    messages: list[dict[str, Any]] = []
    reasoning: dict[str, str] = {}  # that the next answer takes
    for index, item in enumerate(raw):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            raise wrong(where, item, "send an object")
        kind = item.get("type") or "message"
        if kind == "reasoning":
            parts = typed(f"{where}.content", item.get("content"), list, "send a list of parts") or ()
            texts = [part.get("text") for part in parts if isinstance(part, dict)]
            thought = "".join(text for text in texts if isinstance(text, str))
            reasoning = {"reasoning_content": thought} if thought else {}
        elif kind == "message":
            message = {"role": item.get("role"), "content": _content(item.get("content"))}
            if message["role"] == "assistant":
                message, reasoning = message | reasoning, {}
            messages.append(message)
        elif kind == "function_call":
            space, name = item.get("namespace"), item.get("name")
            function = {"name": f"{space}{_IN_NAMESPACE}{name}" if space else name, "arguments": item.get("arguments")}
            call = {"type": "function", "id": item.get("call_id"), "function": function}
            if reasoning or not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": "", **reasoning})
                reasoning = {}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        else:
            raise RequestError(
                f"{where} is of type {short(kind)}: send message, reasoning, function_call or function_call_output",
                param=where,
            )
    return messages


def _content(raw: Any) -> Any:
    """Return content in the form of a chat completion; parts that it does not know stay, to be refused."""
    parts = [raw] if isinstance(raw, dict) else raw
    return [_chat_part(part) for part in parts] if isinstance(parts, list) else raw


def _chat_part(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "input_image":
        return {"type": "image_url", "image_url": part.get("image_url") or part.get("file_id")}
    return {**part, "type": "text"} if kind in _TEXTS else part


def _functions(tool: Any, where: str) -> list[dict[str, Any]]:
    """Return a function, or those of a namespace, in the form of a chat completion."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind == "namespace":
        inside = typed(f"{where}.tools", tool.get("tools"), list, "send a list of functions") or []
        functions = [one for number, part in enumerate(inside) for one in _functions(part, f"{where}.tools[{number}]")]
        for one in functions:
            one["function"]["name"] = f"{tool.get('name')}{_IN_NAMESPACE}{one['function'].get('name')}"
        return functions
    if kind != "function":
        raise wrong(where, tool, "send functions; tools that OpenAI runs are not served")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return [{"type": "function", "function": function}]
