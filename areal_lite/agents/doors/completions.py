"""OpenAI's ``POST /v1/chat/completions``, and ``POST /v1/completions``: a prompt without chat template, text or ids."""

import itertools
import time
from collections.abc import Sequence
from typing import Any
from areal_lite.agents.doors.api import Api, event
from areal_lite.agents.session.answer_grammar import answer_grammar
from areal_lite.agents.session.chat_answer import ChatAnswer, Piece
from areal_lite.agents.session.chat_request import ChatRequest, parse_chat_request
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.agents.session.request_fields import RequestError, json_object, wrong
from areal_lite.agents.session.request_options import MAX_CHOICES, MAX_TOP_LOGPROBS, request_options

_OF_CHATS = ("messages", "tools", "continue_final_message", "chat_template_kwargs")


class ChatCompletions(Api):
    """A chat completion; an answer is a choice. Its stream has chunks of role, pieces of text, tool calls and finish
    reason, then usage if asked for, and an end mark."""

    id_prefix = "chatcmpl-"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    nothing: dict[str, Any] = {"delta": {}}
    """A piece without text."""

    def __init__(self, body: bytes, session: ChatSession) -> None:
        super().__init__(body, session)
        created = int(time.time())
        self._head = {"id": self.id, "object": self.chunk_kind, "created": created, "model": self.request.options.model}

    def parse(self, raw: bytes) -> ChatRequest:
        """Return the checked request; messages that an earlier body had are not parsed again."""
        history = self.session.history
        rest, earlier = history.cut(raw)
        return parse_chat_request(
            json_object(rest), history.find, extends=earlier, sent=raw, images=self.session.images
        )

    def reply(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        choices = [self._choice(index, answer, self._whole(answer)) for index, answer in enumerate(answers)]
        completion = {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(answers)}
        for answer in answers:
            if (interaction := self.session.interactions.get(answer.id)) is not None:
                interaction.completion = completion
        return completion

    def start(self) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}}
        return b"".join(self._event(index, role) for index in range(self.request.options.n))

    def text(self, index: int, piece: Piece) -> bytes:
        return self._event(index, {"delta": {"reasoning_content" if piece.is_reasoning else "content": piece.text}})

    def end(self, answers: Sequence[ChatAnswer]) -> bytes:
        parts = []
        for index, answer in enumerate(answers):
            if calls := [{"index": k, **call} for k, call in enumerate(answer.message.get("tool_calls") or ())]:
                parts.append(self._event(index, {"delta": {"tool_calls": calls}}))
        parts += [self._event(index, self.nothing, answer) for index, answer in enumerate(answers)]
        if (self.request.options.stream_options or {}).get("include_usage") is True:
            parts.append(event({**self._head, "choices": [], "usage": self._usage(answers)}))
        return b"".join(parts) + b"data: [DONE]\n\n"

    def _event(self, index: int, text: dict[str, Any], answer: ChatAnswer | None = None) -> bytes:
        return event({**self._head, "choices": [self._choice(index, answer, text)]})

    def _choice(self, index: int, answer: ChatAnswer | None, text: dict[str, Any]) -> dict[str, Any]:
        logprobs = self._logprobs(answer) if answer and self.request.options.logprobs else None
        return {"index": index, **text, "finish_reason": answer and answer.finish_reason, "logprobs": logprobs}

    def _usage(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        prompt = sum(answer.response.input_len for answer in answers[:: self.request.options.n])
        sampled = sum(answer.response.output_len for answer in answers)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def _whole(self, answer: ChatAnswer) -> dict[str, Any]:
        return {"message": answer.message}

    def _logprobs(self, answer: ChatAnswer) -> dict[str, Any]:
        def token(text: str, logprob: float) -> dict[str, Any]:
            return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

        content = []
        for text, logprob, top in _tokens(answer, self.session):
            content.append({**token(text, logprob), "top_logprobs": [token(other, value) for other, value in top]})
        return {"content": content, "refusal": None}


class Completions(ChatCompletions):
    """A completion of one prompt or several; its stream has pieces of text and finish reasons."""

    id_prefix = "cmpl-"
    kind = chunk_kind = "text_completion"
    nothing = {"text": ""}

    def parse(self, raw: bytes) -> ChatRequest:
        body = json_object(raw)
        prompt = body.get("prompt")
        prompts: list[Any] = [prompt]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
            prompts = prompt
        if not all(_is_prompt(each) and type(each) is type(prompts[0]) for each in prompts):
            raise wrong("prompt", prompt, "send a string or a list of token ids, or a list of such prompts of one kind")
        top = body.get("logprobs")
        if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
            raise wrong("logprobs", top, f"send a whole number of at most {MAX_TOP_LOGPROBS}")
        if chat := [name for name in _OF_CHATS if body.get(name)]:
            raise RequestError(f"{chat[0]} is not served here: use /v1/chat/completions", param=chat[0])
        options = request_options({**body, "prompt": None, "logprobs": top is not None, "top_logprobs": top})
        if len(prompts) * options.n > MAX_CHOICES:
            raise wrong("prompt", prompt, f"send at most {MAX_CHOICES} prompts, with n at most {MAX_CHOICES} choices")
        return ChatRequest(prompts=prompts, grammar=answer_grammar(body, None), options=options)

    def start(self) -> bytes:
        return b""  # the first event has text

    def text(self, index: int, piece: Piece) -> bytes:
        return self._event(index, {"text": piece.text})

    def _whole(self, answer: ChatAnswer) -> dict[str, Any]:
        return {"text": str(answer.message["content"])}

    def _logprobs(self, answer: ChatAnswer) -> dict[str, Any]:
        tokens = _tokens(answer, self.session)
        texts = [text for text, _, _ in tokens]
        return {
            "tokens": texts,
            "token_logprobs": answer.response.output_logprobs,
            "top_logprobs": [dict(top) for _, _, top in tokens] if answer.response.output_top_logprobs else None,
            "text_offset": [*itertools.accumulate(map(len, texts), initial=0)][:-1],
        }


def _is_prompt(prompt: Any) -> bool:
    ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 2**31 for token in prompt)
    return bool(prompt) and (ids or isinstance(prompt, str))


def _tokens(answer: ChatAnswer, session: ChatSession) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """Return text and log-prob of each sampled token, and those of the likeliest tokens there if asked for."""
    response = answer.response
    tops = response.output_top_logprobs or [[] for _ in response.output_tokens]
    texts = session.token_texts(response.output_tokens)
    others = [[(session.token_texts([token])[0], logprob) for token, logprob in top] for top in tops]
    return list(zip(texts, response.output_logprobs, others, strict=True))
