"""Answers of tokenizers that describe their own format: transformers' ``tokenizer.response_template``.

Guarantees that parsing never raises. transformers raises for a call that it cannot read, so such an answer is read
again without the fields of calls, and its calls are text. Text is collected from the parser's events, not from its
message: the message keeps only the last of several texts, and a stream has sent the first one by then.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from areal_lite.agents.parsers.answer_parser import ParsedAnswer, declared_tools, openai_call
from areal_lite.agents.parsers.call_json import ToolCall, read_bare_calls, read_call
from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from transformers.utils.chat_parsing.response_templates import ResponseTemplate

_CHUNK = 256
"""Characters given to transformers at once: each marker searches all of them, so repeated markers cost the square."""
_REASONING = ("reasoning_content", "reasoning", "thinking")


class Regions:
    """Content, reasoning and calls of one answer, while it arrives."""

    def __init__(self, template: "ResponseTemplate", tools: Sequence[dict[str, Any]] | None, prefill: str) -> None:
        from transformers.utils.chat_parsing import ResponseParser

        self.content = self.reasoning = ""
        self.calls: list[Any] = []
        self.in_call = False
        self._parser: Any = ResponseParser(template, prefix=prefill, tools=list(tools or []))

    def feed(self, text: str) -> None:
        """Take the next text; raises whatever the template's parsers raise."""
        for start in range(0, len(text), _CHUNK):
            self._take(self._parser.feed(text[start : start + _CHUNK]))

    def finish(self) -> None:
        self._take(self._parser.finalize()[1])

    def _take(self, events: list[dict[str, Any]]) -> None:
        for event in events:
            if event["field"] == "content":
                self.content = (self.content + event.get("text", "")).lstrip()
            elif event["field"] in _REASONING:
                self.reasoning = (self.reasoning + event.get("text", "")).lstrip()
            else:
                self.in_call = True
                if event["type"] == "region_close":
                    value = event["value"]
                    self.calls += value if isinstance(value, list) else [value]


class ResponseTemplateParser:
    reads_prefill = True

    def __init__(self, spec: dict[str, Any], *, splits_reasoning: bool = True) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        try:
            template = load_response_template(spec)
        except Exception as error:
            raise ConfigError(
                f"the tokenizer's response_template is invalid: {error}: correct it, or set rollout.agents.tool_parser"
            ) from error
        as_text: Any = {"content": "text", "content_args": {}, "transform": None, "repeats": False, "join": None}
        fields, texts = {}, {}
        for name, field in template.fields.items():
            if splits_reasoning or name not in _REASONING:
                fields[name] = dataclasses.replace(field, optional=True)
                if name == "content" or name in _REASONING:
                    texts[name] = dataclasses.replace(fields[name], **as_text)
        self._template = dataclasses.replace(template, fields=fields)
        self._texts = dataclasses.replace(template, fields=texts)
        """Without calls, which are then content."""

    def reads(self, token: str, *, tools: bool) -> bool:
        fields = (self._template if tools else self._texts).fields.values()
        patterns = [one.pattern.replace("\\", "") for field in fields for one in (field.open_re, field.close_re) if one]
        return any(token in pattern for pattern in patterns)

    def regions(self, tools: Sequence[dict[str, Any]] | None, prefill: str) -> Regions:
        """Return the reader of an answer; without ``tools``, calls are content."""
        template = self._template if tools else self._texts
        return Regions(template, tools, prefill if template.start_anchor_re.search(prefill) else "")

    def parse(
        self, text: str, tools: Sequence[dict[str, Any]] | None, *, prefill: str = "", bare_json: bool = False
    ) -> ParsedAnswer:
        content = reasoning = ""
        calls = read_bare_calls(text, declared_tools(tools)) if tools and bare_json else []
        if not calls:
            try:
                regions = self.regions(tools, prefill)
                regions.feed(text)
                regions.finish()
                calls = [_read_call(call) for call in regions.calls]
            except Exception:
                return self.parse(text, None, prefill=prefill)._replace(unparsable=True)
            content, reasoning = regions.content.rstrip(), regions.reasoning.rstrip()
        unparsable = not all(call.is_json for call in calls)
        return ParsedAnswer(content, reasoning, [openai_call(call) for call in calls], unparsable)


def has_usable_template(tokenizer: Any) -> bool:
    """Return whether a tokenizer has a response template in which text without markers is content."""
    spec = getattr(tokenizer, "response_template", None)
    content = (spec.get("fields") or {}).get("content") if isinstance(spec, dict) else None
    return isinstance(content, dict) and content.keys().isdisjoint(("open", "open_pattern"))


def _read_call(value: Any) -> ToolCall:
    call = read_call(value)
    if call is None or not isinstance(value["function"].get("arguments"), str | dict | None):
        raise ValueError("no call with a name and arguments")
    return call
