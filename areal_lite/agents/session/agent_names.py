"""Names for the agents of one session; a system prompt is an agent."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from areal_lite.agents.session.chat_request import ChatRequest

MAIN = "main"
_NAME_WORDS, _NAME_CHARACTERS = 6, 60


class AgentNames:
    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}
        """Names per system prompt, the main agent's first."""

    def name(self, request: ChatRequest) -> str:
        """Return the name of the agent that sent a request.

        It is the name that the request gives: ``metadata.agent``, or the ``name`` of its system message. Otherwise the
        first system prompt is ``main``, and another one is named by its first words that it does not share with it.
        """
        system = list(takewhile(lambda message: message["role"] == "system", request.messages))
        given = request.options.agent or next((message["name"] for message in system if "name" in message), "")
        if given and (given := _shortened(given.split())):
            return given
        key = tuple(message["content"] for message in system)
        if key not in self._names:
            self._names[key] = self._new_name(key)
        return self._names[key]

    def _new_name(self, key: tuple[str, ...]) -> str:
        if not self._names:
            return MAIN
        words, main = _words(key), _words(next(iter(self._names)))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, main, strict=False)))
        name = _shortened((words[shared:] or words)[:_NAME_WORDS]) or "no system prompt"
        return f"{name} {len(self._names) + 1}" if name in self._names.values() else name


def _words(key: tuple[str, ...]) -> list[str]:
    return "\n".join(key)[:4000].split()


def _shortened(words: list[Any]) -> str:
    return " ".join(words)[:_NAME_CHARACTERS].rstrip()
