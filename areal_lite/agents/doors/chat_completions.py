"""OpenAI's chat completions: ``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from areal_lite.agents.doors.api import event, openai_error
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.chat_session import Answer, ChatSession
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.agents.session.text_stream import Piece


class ChatCompletions:
    """Bodies and replies of chat completions."""

    id_prefix = "chatcmpl-"

    def parse(self, raw: bytes, session: ChatSession) -> ChatRequest:
        """Return the checked request."""
        return session.parse(raw)

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

    def stream(self, request: ChatRequest, session: ChatSession) -> ChatCompletionStream:
        """Return a writer of ``chat.completion.chunk`` events."""
        return ChatCompletionStream(request, session)

    def error(self, error: RequestError) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return openai_error(error)


class ChatCompletionStream:
    """Writes chunks: role, pieces of text, tool calls, finish reason, then usage if asked for."""

    def __init__(self, request: ChatRequest, session: ChatSession) -> None:
        self._request = request
        self._session = session
        self._head: dict[str, Any] = {}

    def start(self, answer_id: str) -> bytes:
        """Return each choice's chunk with the role."""
        self._head = {
            "id": answer_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": self._request.model,
        }
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(index, role) for index in range(self._request.n))

    def text(self, index: int, piece: Piece) -> bytes:
        """Return the chunk of a piece of text or reasoning."""
        return self._chunk(index, {"reasoning_content" if piece.is_reasoning else "content": piece.text})

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return tool calls, finish reasons, usage and the end mark."""
        parts = []
        for index, answer in enumerate(answers):
            if calls := answer.message.get("tool_calls"):
                indexed = [{"index": place, **call} for place, call in enumerate(calls)]
                parts.append(self._chunk(index, {"tool_calls": indexed}))
            logprobs = _logprobs(answer, self._session) if self._request.logprobs else None
            parts.append(self._chunk(index, {}, finish_reason=answer.finish_reason, logprobs=logprobs))
        if self._request.stream_usage:
            parts.append(event({**self._head, "choices": [], "usage": openai_usage(answers)}))
        return b"".join(parts) + b"data: [DONE]\n\n"

    def error(self, error: RequestError) -> bytes:
        """Return the error as an event."""
        return event(openai_error(error))

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        return event({**self._head, "choices": [choice]})


def openai_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return OpenAI's token counts; the prompt counts once."""
    prompt = answers[0].response.input_len
    sampled = sum(answer.response.output_len for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


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
