"""One episode's conversation with the model, as tokens.

Guarantees: sampled ids, log-probs and versions are kept as the engine returned them and are never
tokenized again. A request whose messages begin with an earlier request and its answer is generated
from the recorded ids of both plus the newly rendered messages, so the two are one sequence. Whatever
else a client sends starts a sequence of its own. Messages are looked up in a tree, one step each, and
only the new ones are rendered; the work per turn does not grow with the turns.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from areal_lite.agents.chat_renderer import ChatRenderer
from areal_lite.agents.chat_request import (
    ChatRequest,
    RequestError,
    parse_chat_request,
    parse_message,
    without_reasoning,
)
from areal_lite.agents.chat_sampling import request_gconfig
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.generation import GenerationHyperparameters
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.errors import ConfigError, ContextOverflowError

logger = logging.getLogger(__name__)

Style = Literal["individual", "concat"]
Interactions = dict[str, InteractionWithTokenLogpReward]


@dataclass(slots=True)
class _Node:
    """A conversation so far; ``interaction`` where its last message is an answer of ours."""

    children: dict[Hashable, _Node] = field(default_factory=dict)
    interaction: InteractionWithTokenLogpReward | None = None


class ChatSession:
    """The token cache of one episode.

    Args:
        engine: Generates; only ``agenerate`` is used.
        renderer: The tokenizer with its chat template.
        gconfig: The run's sampling parameters.
        agent_samples: Whether the agent's temperature, top_p and the like apply; not while training.

    Attributes:
        interactions: Every answer by completion id, in the order they came.
        clean_turns: Answers whose prompt holds no earlier answer, or holds it as sampled.
        forks: Answers whose prompt renders an assistant message from text although the session has
            answers: the client's history does not exactly extend them.
        tool_parse_errors: Answers with a tool call whose name or arguments cannot be parsed.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        renderer: ChatRenderer,
        gconfig: GenerationHyperparameters,
        *,
        agent_samples: bool = False,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._agent_samples = agent_samples
        stop_ids = dict.fromkeys([*(gconfig.stop_token_ids or []), *renderer.stop_ids])
        self._gconfig = gconfig.new(stop_token_ids=list(stop_ids) or None)
        self._roots: dict[bytes, _Node] = {}
        self._closed = False
        self.interactions: Interactions = {}
        self.clean_turns = 0
        self.forks = 0
        self.tool_parse_errors = 0
        self.error: Exception | None = None
        """The engine's error in the latest call; None if that succeeded."""
        self.refusal: RequestError | None = None
        """The latest invalid request."""

    async def create(self, body: Any) -> dict[str, Any]:
        """Answer one chat completion request with the JSON object of OpenAI's API.

        Raises:
            RequestError: If the request is bad (400) or no server answers (503).
        """
        try:
            completion = await self._create(parse_chat_request(body))
        except RequestError as error:
            self.refusal = error
            raise
        except Exception as error:
            self.error = error
            raise RequestError(
                f"the engine failed: {type(error).__name__}: {error}"[:500], status=503
            ) from error
        self.error = None
        return completion

    def close(self) -> None:
        """End the session: later answers are not recorded."""
        self._closed = True

    async def _create(self, request: ChatRequest) -> dict[str, Any]:
        root = self._roots.setdefault(request.render_key, _Node())
        parent, known = self._longest_recorded(root, request.keys)
        new = request.messages[known:]
        prompt, parent = await self._prompt(request, parent, new)
        if parent is None:
            new = request.messages
        is_fork = bool(self.interactions) and any(message["role"] == "assistant" for message in new)
        gconfig = request_gconfig(
            self._gconfig, request, prompt_tokens=len(prompt), agent_samples=self._agent_samples
        )
        try:
            with attributed_to(FailureKind.ENGINE):
                response = await self._engine.agenerate(
                    ModelRequest(input_ids=prompt, gconfig=gconfig, tokenizer=self._renderer.tokenizer)
                )
        except ConfigError as error:
            too_long = isinstance(error, ContextOverflowError)
            code = "context_length_exceeded" if too_long else None
            raise RequestError(str(error)[:500], param="messages", code=code) from error
        message, finish_reason = self._message(request, response)
        completion = _completion(request, response, message, finish_reason, self._renderer)
        if not self._closed:
            interaction = InteractionWithTokenLogpReward(
                model_response=response,
                parent=parent,
                messages=request.messages,
                output_message_list=[message],
                completion=completion,
            )
            self._record(root, request.keys, interaction)
            self.forks += is_fork
            self.clean_turns += not is_fork
        return completion

    def _longest_recorded(
        self, root: _Node, keys: Sequence[Hashable]
    ) -> tuple[InteractionWithTokenLogpReward | None, int]:
        """Return the answer that ends the longest recorded prefix of ``keys``, and the prefix's length."""
        node = root
        parent, known = None, 0
        for depth, key in enumerate(keys, 1):
            child = node.children.get(key)
            if child is None:
                break
            node = child
            if node.interaction is not None:
                parent, known = node.interaction, depth
        return parent, known

    def _record(
        self, root: _Node, keys: Sequence[Hashable], interaction: InteractionWithTokenLogpReward
    ) -> None:
        answer = interaction.output_message_list[0]
        node = root
        for key in keys:
            node = node.children.setdefault(key, _Node())
        _, key = parse_message(answer, "answer")
        prompt, node = node, node.children.setdefault(key, _Node())
        prompt.children.setdefault(without_reasoning(key), node)  # a client may leave the reasoning out
        node.interaction = interaction
        self.interactions[interaction.completion["id"]] = interaction

    async def _prompt(
        self, request: ChatRequest, parent: InteractionWithTokenLogpReward | None, new: list[dict[str, Any]]
    ) -> tuple[list[int], InteractionWithTokenLogpReward | None]:
        if parent is not None:
            recorded = parent.model_response
            try:
                added = await self._renderer.continuation(
                    recorded.output_tokens,
                    recorded.stop_reason != "length",
                    new,
                    request.tools,
                    request.template_kwargs,
                )
                return [*recorded.input_tokens, *recorded.output_tokens, *added], parent
            except RequestError:
                logger.debug("the new messages cannot be rendered alone", exc_info=True)
        return await self._renderer.prompt(request.messages, request.tools, request.template_kwargs), None

    def _message(self, request: ChatRequest, response: ModelResponse) -> tuple[dict[str, Any], str]:
        """Return the assistant message and the finish reason; the text is a view of the ids."""
        text = self._renderer.answer_text(
            response.output_tokens,
            skip_special_tokens=self._gconfig.skip_special_tokens,
            tools=request.parse_tools,
        )
        for stop in [*(self._gconfig.stop or []), *request.stop]:
            text = text.partition(stop)[0]
        parsed = self._renderer.answer_parser.parse(
            text,
            request.tools if request.parse_tools else None,
            thinking=self._renderer.opens_thinking(response.input_tokens),
        )
        self.tool_parse_errors += parsed.unparsable
        if parsed.tool_calls:
            return parsed.message(), "tool_calls"
        return parsed.message(), "stop" if response.stop_reason in ("stop", "tool_calls") else "length"

    def export(self, style: Style) -> Interactions:
        """Return the sequences to train on, by completion id; the originals stay as they are.

        Args:
            style: "individual": every answer is a sequence of its own, its prompt not trained. "concat":
                every conversation is one sequence that trains all its answers; where conversations branch,
                the earlier one trains what they share, so each sampled token is trained once.
        """
        if style == "individual":
            return {key: replace(answer, concat=False) for key, answer in self.interactions.items()}
        if style != "concat":
            raise ValueError(f"style is {style!r}: use 'individual' or 'concat'")
        parents = {id(answer.parent) for answer in self.interactions.values()}
        trained: set[int] = set()
        sequences = {}
        for key, leaf in self.interactions.items():
            if id(leaf) in parents:
                continue
            sequence: InteractionWithTokenLogpReward | None = None
            for node in leaf.chain():
                sequence = replace(node, parent=sequence, concat=True, trained=id(node) not in trained)
                trained.add(id(node))
            assert sequence is not None
            sequences[key] = sequence
        return sequences


def _completion(
    request: ChatRequest,
    response: ModelResponse,
    message: dict[str, Any],
    finish_reason: str,
    renderer: ChatRenderer,
) -> dict[str, Any]:
    logprobs = None
    if request.logprobs:
        content = []
        for token, logprob in zip(response.output_tokens, response.output_logprobs, strict=True):
            text = renderer.decode([token], skip_special_tokens=False)
            content.append(
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            )
        logprobs = {"content": content, "refusal": None}
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "choices": [{"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": logprobs}],
        "usage": {
            "prompt_tokens": response.input_len,
            "completion_tokens": response.output_len,
            "total_tokens": response.input_len + response.output_len,
        },
    }
