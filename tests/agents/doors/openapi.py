"""An OpenAPI description of the agents' service, for tools that generate clients or test requests.

Guarantees that it names exactly the fields that the APIs read: the names come from their parsers. Fields whose type is
not given here may have any.
"""

from __future__ import annotations
from typing import Any
from areal_lite import __version__
from areal_lite.agents.doors import generate_content, messages, responses
from areal_lite.agents.doors.agent_service import MAX_BODY_BYTES
from areal_lite.agents.session import chat_request, request_options

_OBJECT = {"type": "object"}
_STRINGS = {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 4}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_POSITIVE = {"type": "integer", "minimum": 1}
_TEXT_PARTS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}
_TEXT = {"anyOf": [{"type": "string"}, _TEXT_PARTS]}
_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": "string"},
        "parameters": _OBJECT,
    },
    "required": ["name"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
            "required": ["name", "arguments"],
        },
    },
    "required": ["function"],
}
_FIELDS: dict[str, Any] = {
    "chat_template_kwargs": _OBJECT,
    "ignore_eos": {"type": "boolean"},
    "input": {
        "anyOf": [
            {"type": "string"},
            {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"role": {"enum": [*chat_request._ROLES]}, "content": {"type": "string"}},
                    "required": ["role", "content"],
                },
            },
        ]
    },
    "instructions": {"type": "string"},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "logprobs": {"type": "boolean"},
    "max_completion_tokens": _POSITIVE,
    "max_output_tokens": _POSITIVE,
    "max_tokens": _POSITIVE,
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": [*chat_request._ROLES]},
                "content": _TEXT,
                "tool_calls": {"type": "array", "items": _CALL},
                "tool_call_id": {"type": "string"},
            },
            "required": ["role", "content"],
        },
    },
    "min_tokens": {"type": "integer", "minimum": 0},
    "model": {"type": "string"},
    "n": {"type": "integer", "minimum": 1, "maximum": request_options.MAX_CHOICES},
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {**_IDS, "minItems": 1},
            {"type": "array", "minItems": 1, "maxItems": 2, "items": {"type": "string", "minLength": 1}},
            {"type": "array", "minItems": 1, "maxItems": 2, "items": {**_IDS, "minItems": 1}},
        ]
    },
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string", "minLength": 1}, _STRINGS]},
    "stop_sequences": _STRINGS,
    "stop_token_ids": _IDS,
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
    "system": _TEXT,
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
    "tools": {
        "type": "array",
        "maxItems": chat_request.MAX_TOOLS,
        "items": {
            "type": "object",
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
            "required": ["type", "function"],
        },
    },
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": request_options.MAX_TOP_LOGPROBS},
    **{
        name: schema["anyOf"][0]
        for name, schema in request_options.RequestOptions.model_json_schema()["properties"].items()
        if name in request_options._SAMPLING
    },
}
"""Types of fields by name; equal names mean the same in every API, with the exceptions below."""
_COMPLETION_FIELDS = {"logprobs": _FIELDS["top_logprobs"]}
_RESPONSE_FIELDS = {"tools": {"type": "array", "items": {"type": "object", "required": ["type", "name"]}}}
_MESSAGE_FIELDS = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXT},
            "required": ["role", "content"],
        },
    },
    "tool_choice": {"type": "object", "properties": {"type": {"enum": ["auto", "any", "none", "tool"]}}},
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "input_schema": _OBJECT},
            "required": ["name"],
        },
    },
}
_GEMINI_FIELDS: dict[str, Any] = {
    "contents": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "role": {"enum": ["user", "model"]},
                "parts": {"type": "array", "items": {"type": "object", "properties": {"text": {"type": "string"}}}},
            },
            "required": ["parts"],
        },
    },
    "generationConfig": {"type": "object", "properties": {"maxOutputTokens": {"type": "integer"}}},
    "labels": _OBJECT,
}
_RESPONSE_ID = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


def openapi() -> dict[str, Any]:
    """Return the description, in OpenAPI 3.1."""
    chat = {
        *request_options.READ_ELSEWHERE, *request_options.IGNORED, *request_options.RequestOptions.model_fields,
    }  # fmt: skip
    message_names = {*messages.Messages.as_chat, *messages.Messages.other_fields}
    response_names = {*responses.Responses.as_chat, *responses.Responses.other_fields}
    completion_names = {*chat, "prompt"} - {"messages", "tools", "tool_choice", "functions", "function_call"}
    gemini = {*generate_content.GenerateContent.as_chat, *generate_content.GenerateContent.other_fields}
    message = _operation("createMessage", message_names, ["messages"], _MESSAGE_FIELDS)
    count = _operation("countTokens", message_names, ["messages"], _MESSAGE_FIELDS)
    return {
        "openapi": "3.1.0",
        "info": {"title": "areal_lite agents", "version": __version__},
        "security": [{"bearer": []}, {"x-api-key": []}],
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            }
        },
        "paths": {
            "/v1/chat/completions": _operation("createChatCompletion", chat, ["messages"], {}),
            "/v1/completions": _operation("createCompletion", completion_names, ["prompt"], _COMPLETION_FIELDS),
            "/v1/responses": _operation("createResponse", response_names, ["input"], _RESPONSE_FIELDS),
            "/v1/messages": message,
            "/v1/messages/count_tokens": count,
            "/v1beta/models/m:generateContent": _operation("generateContent", gemini, ["contents"], _GEMINI_FIELDS),
            "/v1/responses/{id}": {
                "parameters": [_RESPONSE_ID],
                "get": {"operationId": "getResponse", "responses": _responses(has_stream=False)},
                "delete": {"operationId": "deleteResponse", "responses": _responses(has_stream=False)},
            },
            "/v1/responses/{id}/input_items": {
                "parameters": [_RESPONSE_ID],
                "get": {
                    "operationId": "listInputItems",
                    "parameters": [{"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"]}}],
                    "responses": _responses(has_stream=False),
                },
            },
            "/v1/models": {"get": {"operationId": "listModels", "responses": _responses(has_stream=False)}},
        },
    }


def _operation(name: str, fields: set[str], required: list[str], own: dict[str, Any]) -> dict[str, Any]:
    types = {**_FIELDS, **own}
    schema = {
        "type": "object",
        "properties": {field: types.get(field, {}) for field in sorted(fields)},
        "required": required,
        "additionalProperties": False,
    }
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"operationId": name, "requestBody": body, "responses": _responses(has_stream=True)}}


def _responses(*, has_stream: bool) -> dict[str, Any]:
    whole: dict[str, Any] = {"application/json": {"schema": _OBJECT}}
    streamed = {"text/event-stream": {"schema": {"type": "string"}}} if has_stream else {}
    error = {"schema": {"type": "object", "required": ["error"]}}
    reasons = {
        "400": "A field is wrong; the message names it.",
        "401": "No session has this key.",
        "403": "A web page sent it.",
        "404": "Not served.",
        "405": "Another method is needed.",
        "408": "The request did not arrive in time.",
        "410": "The episode has ended.",
        "413": f"The body has more than {MAX_BODY_BYTES} bytes.",
        "415": "The body is not application/json.",
        "431": "The headers are too long.",
        "503": "No server answers, or too many connections.",
    }
    return {
        "200": {"description": "The answer.", "content": {**whole, **streamed}},
        **{
            status: {"description": reason, "content": {"application/json": error}}
            for status, reason in reasons.items()
        },
    }
