"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from areal_lite.agents.doors.api import Api, EventStream, event
from areal_lite.agents.session.chat_answer import Answer
from areal_lite.agents.session.chat_request import ChatRequest, parse_chat_request
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import json_object
from areal_lite.agents.session.text_stream import Piece


class ChatCompletionStream(EventStream):
    """Writes chunks: role, pieces of text, tool calls, finish reason, then usage if asked for."""

    def start(self, answer_id: str) -> bytes:
        """Return each choice's chunk with the role."""
        self._head: dict[str, Any] = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self.request.model,
        }
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, role) for index in range(self.request.n))

    def text(self, index: int, piece: Piece) -> bytes:
        """Return the chunk of a piece of text or reasoning."""
        return self._chunk(index, {"reasoning_content" if piece.is_reasoning else "content": piece.text})

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return tool calls, finish reasons, usage and the end mark."""
        parts = []
        for index, answer in enumerate(answers):
            if calls := answer.message.get("tool_calls"):
                indexed = [{"index": number, **call} for number, call in enumerate(calls)]
                parts.append(self._chunk(index, {"tool_calls": indexed}))
            logprobs = _logprobs(answer, self.session) if self.request.logprobs else None
            parts.append(self._chunk(index, {}, finish_reason=answer.finish_reason, logprobs=logprobs))
        return b"".join(parts) + end_of_choices(self._head, self.request, answers)

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return event({**self._head, "choices": [choice]})


class ChatCompletions(Api):
    """Bodies and replies of chat completions."""

    id_prefix = "chatcmpl-"
    event_stream = ChatCompletionStream

    def parse(self, raw: bytes, session: ChatSession) -> ChatRequest:
        return parse_chat_request(json_object(raw), session.history.find)

    def reply(self, request: ChatRequest, answers: Sequence[Answer], session: ChatSession) -> dict[str, Any]:
        """Return a ``chat.completion``."""
        choices = [
            {
                "index": index,
                "message": answer.message,
                "finish_reason": answer.finish_reason,
                "logprobs": _logprobs(answer, session) if request.logprobs else None,
            }
            for index, answer in enumerate(answers)
        ]
        completion = {
            "id": answers[0].id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": choices,
            "usage": openai_usage(answers),
        }
        for answer in answers:
            if (interaction := session.interactions.get(answer.id)) is not None:
                interaction.completion = completion
        return completion


def openai_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return OpenAI's token counts; the prompt counts once."""
    prompt = answers[0].response.input_len
    sampled = sum(answer.response.output_len for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def end_of_choices(head: dict[str, Any], request: ChatRequest, answers: Sequence[Answer]) -> bytes:
    """Return the events after the last choice: usage if the client asked for it, and the end mark."""
    usage = event({**head, "choices": [], "usage": openai_usage(answers)}) if request.stream_usage else b""
    return usage + b"data: [DONE]\n\n"


def _logprobs(answer: Answer, session: ChatSession) -> dict[str, Any]:
    response = answer.response
    texts = session.token_texts(response.output_tokens)
    tops = response.output_top_logprobs or [[] for _ in texts]
    content = [
        {
            **_token(text, logprob),
            "top_logprobs": [
                _token(other, value)
                for other, (_, value) in zip(session.token_texts([i for i, _ in top]), top, strict=True)
            ],
        }
        for text, logprob, top in zip(texts, response.output_logprobs, tops, strict=True)
    ]
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
