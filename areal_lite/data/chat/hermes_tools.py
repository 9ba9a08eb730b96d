"""Tools for chat templates that do not render them: detect such a template, and write tools as plain messages.

As in Hermes: tools in the system prompt, ``<tool_call>`` in the assistant's text, ``<tool_response>`` in the user's.
"""

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any
import orjson
from areal_lite.data.chat.chat_template import ChatTemplate, TemplateError
from areal_lite.errors import ConfigError

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "x",
        "parameters": {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}, "required": []},
    },
}
_INSTRUCTIONS = """\
# Tools

You can call the functions in <tools></tools>:
<tools>
{tools}
</tools>

To call one, write a JSON object with its name and arguments in <tool_call></tool_call>, once per call:
<tool_call>
{{"name": "<function name>", "arguments": {{"<argument>": "<value>"}}}}
</tool_call>
The results come in <tool_response></tool_response>."""


def drops_tools(tokenizer: Any, template_kwargs: Mapping[str, Any]) -> bool:
    """Return whether the chat template renders the same text with and without tools; cached by all arguments."""
    return _drops_tools(
        tokenizer,
        repr(getattr(tokenizer, "chat_template", None)),
        orjson.dumps(template_kwargs, option=orjson.OPT_NON_STR_KEYS, default=str),
    )


def check_tools_are_rendered(tokenizer: Any, tools: Any, template_kwargs: Mapping[str, Any]) -> None:
    """Check that the chat template renders the tools, if there are any."""
    if tools and drops_tools(tokenizer, template_kwargs):
        raise ConfigError(
            "the chat template does not render tools, so the model would not see them: set tools_in_system_prompt of "
            "the dataset to true, which writes them into the system prompt, or use a template that renders tools"
        )


def in_hermes_form(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """Return messages for a template that knows no tools."""
    plain: list[dict[str, Any]] = []
    if tools:
        text = _INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages and messages[0].get("role") == "system":
            plain.append({**messages[0], "content": f"{_text(messages[0])}\n\n{text}".lstrip("\n")})
            messages = messages[1:]
        else:
            plain.append({"role": "system", "content": text})
    previous_role = None
    for message in messages:
        role = message.get("role")
        if role == "tool":
            result = _joined("<tool_response>\n", _own(message), "\n</tool_response>")
            if previous_role == "tool":
                plain[-1]["content"] = _joined(plain[-1]["content"], "\n", result)
            else:
                plain.append({"role": "user", "content": result})
        elif message.get("tool_calls"):
            parts = [_text(message), *map(_call, message["tool_calls"])]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            plain.append({**rest, "content": "\n".join(part for part in parts if part)})
        else:
            plain.append(dict(message))
        previous_role = role
    return plain


@functools.lru_cache(maxsize=64)
def _drops_tools(tokenizer: Any, template: str, template_kwargs: bytes) -> bool:
    variables = orjson.loads(template_kwargs)
    without, with_tools = (ChatTemplate(tokenizer, tools, variables) for tools in (None, [_PROBE_TOOL]))
    rendered = False
    user = {"role": "user", "content": "x"}
    for messages in ([user], [{"role": "system", "content": "x"}, user]):
        with contextlib.suppress(TemplateError):
            if without.write(messages, prompt=True) != with_tools.write(messages, prompt=True):
                return False
            rendered = True
    return rendered


def _call(call: Any) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    name = json.dumps(function.get("name"), ensure_ascii=False)
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


def _own(message: Mapping[str, Any]) -> Any:
    """Return the content: its parts if it has images, else its text."""
    content = message.get("content")
    if isinstance(content, list) and any(isinstance(p, Mapping) and p.get("type") == "image" for p in content):
        return content
    return _text(message)


def _joined(*contents: Any) -> Any:
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    parts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in contents)
    return [part for content in parts for part in content]


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list | tuple):
        return "\n".join(part["text"] for part in content if isinstance(part, Mapping) and "text" in part)
    return content or ""
