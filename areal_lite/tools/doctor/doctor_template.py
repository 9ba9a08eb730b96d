"""``areal-lite doctor MODEL --template``: does a chat template write the history of a conversation again byte for byte?

Where it does not, SFT makes a sequence of each answer, and a server that renders chats shows the model another history
than the one it sampled. Agents go on from their recorded tokens.
"""

import os.path
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from areal_lite.data.chat.chat_template import ChatTemplate, Message, TemplateError
from areal_lite.data.chat.tokenizer import check_chat_template, load_tokenizer
from areal_lite.tools.doctor.doctor_machine import Finding, ok, warning

_TOOL = {
    "name": "add",
    "description": "Add two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def _talk(**answer: Any) -> list[dict[str, Any]]:
    """Return three questions and their answers, each with what ``answer`` has; a tool's result asks, too."""
    messages: list[dict[str, Any]] = []
    for number in "123":
        asks: dict[str, Any] = {"role": "user", "content": f"Question {number}?"}
        if "tool_calls" in answer and messages:
            asks = {"role": "tool", "tool_call_id": _CALL["id"], "name": "add", "content": number}
        messages += [asks, {"role": "assistant", "content": f"Answer {number}.", **answer}]
    return messages


TALKS: Mapping[str, tuple[list[dict[str, Any]], str]] = {
    "answers": (_talk(), "Answer 3."),
    "answers with thoughts as text": (_talk(content="<think>\nA thought.\n</think>\n\nAn answer."), "A thought."),
    "answers with reasoning_content": (_talk(reasoning_content="A thought."), "A thought."),
    "tool calls": (_talk(content="", tool_calls=[_CALL]), "add"),
}
"""Conversations by what they have, and a text that must be written of the last answer."""


def template_findings(path: str) -> Iterator[Finding]:
    """Yield a finding for each kind of conversation; raises ConfigError if there is no template."""
    tokenizer = load_tokenizer(path)
    check_chat_template(tokenizer)
    for name, (messages, text) in TALKS.items():
        tools = [{"type": "function", "function": _TOOL}] if messages[1].get("tool_calls") else None
        template = ChatTemplate(tokenizer, tools, {})
        try:
            if text in template.write(messages).removeprefix(template.write(messages[:-1], prompt=True)):
                yield _compared(name, template, messages)
            else:
                yield warning(f"{name}: the template leaves them out")
        except TemplateError as error:
            yield warning(f"{name}: {error}")


def _compared(name: str, template: ChatTemplate, messages: Sequence[Message]) -> Finding:
    for count in range(1, len(messages)):
        prompts = messages[count]["role"] == "assistant"
        before, after = template.write(messages[:count], prompt=prompts), template.write(messages[: count + 1])
        if after.startswith(before):
            continue
        at = len(os.path.commonprefix([before, after]))
        changed = next((n for n in range(1, count) if len(template.write(messages[:n])) > at), count)
        what = f"the prompt of answer {count + 1}" if prompts and changed == count else f"message {changed}"
        return warning(
            f"{name}: message {count + 1}, of the {messages[count]['role']}, changes {what}: {before[at : at + 60]!r} "
            f"becomes {after[at : at + 60]!r}. SFT makes a sequence of each answer; agents go on from recorded tokens. "
            "A copy of the template that keeps its text makes one sequence of all"
        )
    return ok(f"{name}: {len(messages)} messages are written alike, whatever follows them")
