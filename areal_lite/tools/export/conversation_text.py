"""Recover the messages of a conversation from its text, for any chat template that allows it.

Guarantees that the template renders the messages to exactly that text, with no special token in a message; else none.
"""

import itertools
from typing import Any

Message = dict[str, str]
_MARKS = ("<Wq1>", "<Wq2>", "<Wq3>", "<Wq4>")
_PROBES = (
    *((role,) for role in ("system", "user", "assistant", "tool")),
    ("system", "user", "assistant", "user"),
    ("user", "assistant", "user", "assistant"),
    ("user", "assistant", "tool", "assistant"),
    ("user", "assistant", "tool", "tool"),
    ("user", "user"),
    ("system", "system"),
    ("system", "assistant"),
)
"""Conversations that show what a template writes before, between and after messages."""


class ConversationReader:
    """Reads conversations that the chat template of ``tokenizer`` wrote."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._opening: dict[str, str] = {}
        self._closing: dict[str, str] = {}
        self._between: dict[tuple[str, str], str] = {}
        for roles in _PROBES:
            marks = _MARKS[: len(roles)]
            text = self._render([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
            if text is None or any(text.count(mark) != 1 for mark in marks):
                continue
            begins = [text.index(mark) for mark in marks]
            ends = [begin + len(mark) for begin, mark in zip(begins, marks, strict=True)]
            self._opening.setdefault(roles[0], text[: begins[0]])
            self._closing.setdefault(roles[-1], text[ends[-1] :])
            for pair, end, begin in zip(itertools.pairwise(roles), ends, begins[1:], strict=False):
                self._between.setdefault(pair, text[end:begin])

    def messages(self, text: str) -> list[Message] | None:
        """Return the messages of ``text``, which may end before the last message's end mark; None if unsure."""
        openings = sorted(self._opening.items(), key=lambda item: -len(item[1]))
        role = next((role for role, opening in openings if opening and text.startswith(opening)), None)
        if role is None:
            return None
        messages: list[Message] = []
        at = len(self._opening[role])
        while True:
            marks = [
                (text.find(mark, at), -len(mark), after) for (r, after), mark in self._between.items() if r == role
            ]
            known = [mark for mark in marks if mark[0] >= 0 and mark[1]]
            if not known:
                break
            begin, length, after = min(known)
            messages.append({"role": role, "content": text[at:begin]})
            role, at = after, begin - length
        closing = self._closing.get(role, "")
        ending = next((n for n in range(len(closing), 0, -1) if text.endswith(closing[:n], at)), 0)
        messages.append({"role": role, "content": text[at : len(text) - ending]})
        if any(mark in message["content"] for message in messages for mark in self._special):
            return None  # a model wrote it
        rendered = self._render(messages)
        if rendered is None or not rendered.startswith(text) or not closing.endswith(rendered[len(text) :]):
            return None
        return messages

    def _render(self, messages: list[Message]) -> str | None:
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False))
        except Exception:  # a template is a program, and may refuse an order of roles
            return None
