"""OpenAI's completions: ``POST /v1/completions``, a prompt without chat template, as text or ids."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from areal_lite.agents.doors.api import Api, EventStream, event
from areal_lite.agents.doors.chat_completions import end_of_choices, openai_usage
from areal_lite.agents.session.answer_grammar import answer_grammar
from areal_lite.agents.session.chat_answer import Answer
from areal_lite.agents.session.chat_request import MAX_TOP_LOGPROBS, ChatRequest, request_options
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError, is_token_id, json_object, short, whole
from areal_lite.agents.session.text_stream import Piece


class CompletionStream(EventStream):
    """Writes pieces of text, finish reasons, then usage if asked for."""

    def start(self, answer_id: str) -> bytes:
        """Return nothing: the first event has text."""
        self._head = _head(answer_id, self.request)
        return b""

    def text(self, index: int, piece: Piece) -> bytes:
        """Return the event of a piece of text."""
        choice = {"index": index, "text": piece.text, "finish_reason": None, "logprobs": None}
        return event({**self._head, "choices": [choice]})

    def end(self, answers: Sequence[Answer]) -> bytes:
        """Return finish reasons, usage and the end mark."""
        parts = [
            event({**self._head, "choices": [_choice(index, "", answer, self.request, self.session)]})
            for index, answer in enumerate(answers)
        ]
        return b"".join(parts) + end_of_choices(self._head, self.request, answers)


class Completions(Api):
    """Bodies and replies of completions."""

    id_prefix = "cmpl-"
    event_stream = CompletionStream

    def parse(self, raw: bytes, session: ChatSession) -> ChatRequest:
        """Return the checked request; one prompt per call."""
        body = json_object(raw)
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        ids = isinstance(prompt, list) and all(is_token_id(token) for token in prompt)
        if not prompt or not (ids or isinstance(prompt, str)):
            raise RequestError(
                f"prompt is {short(prompt)}: send one prompt per call, a string or a list of token ids",
                param="prompt",
            )
        top_logprobs = whole("logprobs", body.get("logprobs"), 0, MAX_TOP_LOGPROBS)
        rest = {name: value for name, value in body.items() if name not in ("prompt", "logprobs")}
        return ChatRequest(
            prompt=prompt,
            grammar=answer_grammar(body, None),
            logprobs=top_logprobs is not None,
            top_logprobs=top_logprobs or 0,
            **request_options(rest),
        )

    def reply(self, request: ChatRequest, answers: Sequence[Answer], session: ChatSession) -> dict[str, Any]:
        """Return a ``text_completion``."""
        choices = [
            _choice(index, str(answer.message["content"]), answer, request, session)
            for index, answer in enumerate(answers)
        ]
        return {**_head(answers[0].id, request), "choices": choices, "usage": openai_usage(answers)}


def _head(answer_id: str, request: ChatRequest) -> dict[str, Any]:
    created = int(time.time())
    return {"id": answer_id, "object": "text_completion", "created": created, "model": request.model}


def _choice(index: int, text: str, answer: Answer, request: ChatRequest, session: ChatSession) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        response = answer.response
        texts = session.token_texts(response.output_tokens)
        ends = [0]
        for piece in texts:
            ends.append(ends[-1] + len(piece))
        logprobs = {
            "tokens": texts,
            "token_logprobs": response.output_logprobs,
            "top_logprobs": [
                dict(zip(session.token_texts([i for i, _ in top]), [p for _, p in top], strict=True))
                for top in response.output_top_logprobs
            ]
            or None,
            "text_offset": ends[:-1],
        }
    return {"index": index, "text": text, "finish_reason": answer.finish_reason, "logprobs": logprobs}
