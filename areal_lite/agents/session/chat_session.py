"""One episode's conversation with the model, as tokens.

Guarantees: sampled ids, log-probs and versions are kept as the engine returned them and are never
tokenized again. A request whose messages begin with an earlier request and its answer is generated
from the recorded ids of both plus the newly rendered messages, so the two are one sequence. Whatever
else a client sends starts a sequence of its own. Messages that begin like an earlier request are
compared with it, not parsed again; only the new ones are looked up in the tree and rendered.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from areal_lite.agents.parsers.answer_parser import ParsedAnswer
from areal_lite.agents.session.agent_names import AgentNames
from areal_lite.agents.session.chat_renderer import ChatRenderer
from areal_lite.agents.session.chat_request import (
    ChatRequest,
    Conversation,
    parse_chat_request,
    parse_message,
    without_reasoning,
)
from areal_lite.agents.session.chat_sampling import request_gconfig
from areal_lite.agents.session.request_fields import RequestError, json_object
from areal_lite.agents.session.text_stream import Piece, TextStream
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelRequest, ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ConfigError, ContextOverflowError

logger = logging.getLogger(__name__)

Style = Literal["individual", "concat"]
Interactions = dict[str, InteractionWithTokenLogpReward]
OnText = Callable[[int, Piece], None]
"""Called with the index of a choice and the next piece of its text."""


_CONVERSATIONS_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the model, before it takes an API's form."""

    id: str
    """Key of its interaction."""
    message: dict[str, Any]
    """Assistant message in OpenAI's form: content, tool_calls, reasoning_content."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    stopped_by: str | None
    """The stop string that ended it."""
    response: ModelResponse


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Node:
    """A conversation so far; ``interaction`` where its last message is an answer of ours."""

    root: bytes
    """Key of the tree it is in."""
    before: weakref.ref[_Node] | None = None
    """Weak, so that an ended session, with its tokens, is freed without a garbage collection."""
    depth: int = 0
    """Messages so far."""
    children: dict[Hashable, _Node] = field(default_factory=dict)
    interaction: InteractionWithTokenLogpReward | None = None

    def grow(self, keys: Iterable[Hashable]) -> _Node:
        """Return the node after the messages of ``keys``; make those that are missing."""
        node = self
        for key in keys:
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(node.root, weakref.ref(node), node.depth + 1)
            node = child
        return node


class ChatSession:
    """The token cache of one episode.

    Args:
        engine: Generates; only ``agenerate`` is used.
        renderer: The tokenizer with its chat template.
        gconfig: The run's sampling parameters.
        agent_samples: Whether the agent's temperature, top_p and the like apply; not while training.
        prompt_ids: Tokens of the first request, in place of its rendered messages.

    Attributes:
        interactions: Every answer by completion id, in the order they came.
        clean_turns: Answers whose prompt holds no earlier answer, or holds it as sampled.
        forks: Answers whose prompt renders an assistant message from text although the session has
            answers: the client's history does not exactly extend them.
        forked_tokens: Tokens of earlier conversations that forks rendered anew instead of continuing.
        tool_calls: Tool calls in all answers.
        tool_parse_errors: Answers with a tool call whose name or arguments cannot be parsed.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        renderer: ChatRenderer,
        gconfig: GenerationHyperparameters,
        *,
        agent_samples: bool = False,
        prompt_ids: list[int] | None = None,
    ) -> None:
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._renderer = renderer
        self._agent_samples = agent_samples
        stop_ids = dict.fromkeys([*(gconfig.stop_token_ids or []), *renderer.stop_ids])
        self._gconfig = gconfig.new(stop_token_ids=list(stop_ids) or None)
        self._roots: dict[bytes, _Node] = {}
        self._conversations: deque[Conversation] = deque(maxlen=_CONVERSATIONS_KEPT)
        """Those of the latest requests; their place is a node."""
        self._raw: list[tuple[str, InteractionWithTokenLogpReward]] = []
        """Answers to prompts without template, with the text of prompt and answer."""
        self._names = AgentNames()
        self._closed = False
        self._context = episode_context.current()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Running calls that no task of the episode waits for."""
        self.interactions: Interactions = {}
        self.responses: dict[str, dict[str, Any]] = {}
        """Replies of the Responses API, by id; an agent may read and delete them."""
        self.clean_turns = 0
        self.forks = 0
        self.forked_tokens = 0
        self.tool_calls = 0
        self.tool_parse_errors = 0
        self.error: Exception | None = None
        """The engine's error in the latest call; None if that succeeded."""
        self.refusal: RequestError | None = None
        """The latest invalid request."""

    async def answer(self, request: ChatRequest, answer_id: str, *, on_text: OnText | None = None) -> list[Answer]:
        """Return ``request.n`` answers to one prompt.

        Args:
            request: The checked request.
            answer_id: Id of the first answer; the k-th after it is ``ID-k``.
            on_text: Gets the text while it is sampled.

        Raises:
            RequestError: If the request is bad (400) or no server answers (503).
        """
        if episode_context.current().episode is self._context.episode:
            return await self._answers(request, answer_id, on_text)
        # The call came through a socket or a thread: this task belongs to no episode.
        task = asyncio.current_task()
        assert task is not None
        outside = episode_context.enter(self._context)
        self._tasks.add(task)
        try:
            return await self._answers(request, answer_id, on_text)
        except asyncio.CancelledError:
            if self._closed and not task.uncancel():
                raise RequestError("the episode has ended", status=410, code="session_ended") from None
            raise
        finally:
            self._tasks.discard(task)
            episode_context.leave(outside)

    async def _answers(self, request: ChatRequest, answer_id: str, on_text: OnText | None) -> list[Answer]:
        try:
            if request.n == 1:
                answers = [await self._answer(request, 0, answer_id, on_text)]
            else:
                async with asyncio.TaskGroup() as tasks:
                    running = [
                        tasks.create_task(self._answer(request, k, f"{answer_id}-{k}" if k else answer_id, on_text))
                        for k in range(request.n)
                    ]
                answers = [task.result() for task in running]
        except Exception as failure:
            error: BaseException = failure
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            assert isinstance(error, Exception)
            if isinstance(error, RequestError):
                self.refusal = error
                raise error from None
            self.error = error
            raise RequestError(f"the engine failed: {type(error).__name__}: {error}"[:500], status=503) from error
        self.error = None
        return answers

    def counts(self) -> dict[str, float]:
        """Return the session's numbers by name; see docs/metrics.md."""
        return {
            "answers": float(len(self.interactions)),
            "clean_turns": float(self.clean_turns),
            "forks": float(self.forks),
            "forked_tokens": float(self.forked_tokens),
            "tool_calls": float(self.tool_calls),
            "tool_parse_errors": float(self.tool_parse_errors),
        }

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return how many tokens the prompt of a request has."""
        return (await self._find_prompt(request))[0].length

    def own(self, task: asyncio.Task[list[Answer]]) -> None:
        """Cancel ``task`` when the session closes."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End the session: running calls stop, and later answers are not recorded."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _answer(self, request: ChatRequest, index: int, answer_id: str, on_text: OnText | None) -> Answer:
        agent = self._names.name(request)  # before other calls may run: the first one is the main agent's
        prefix, parent, is_fork = await self._find_prompt(request)
        prompt = prefix.tolist()
        thinking = self._opens_thinking(request, prompt)
        gconfig = request_gconfig(self._gconfig, request, prompt_tokens=len(prompt), agent_samples=self._agent_samples)
        if request.n > 1 and gconfig.seed is not None:
            gconfig = gconfig.new(seed=gconfig.seed + index)
        stops = [*(self._gconfig.stop or []), *request.stop]
        text = None if on_text is None else self._text_stream(request, thinking, stops)

        def on_tokens(ids: Sequence[int], _: Sequence[float]) -> None:
            assert text is not None and on_text is not None
            for piece in text.feed([token for token in ids if token not in self._renderer.stop_ids]):
                on_text(index, piece)

        try:
            with attributed_to(FailureKind.ENGINE):
                response = await self._engine.agenerate(
                    ModelRequest(
                        input_ids=prompt,
                        prefix=prefix,
                        gconfig=gconfig,
                        tokenizer=self._renderer.tokenizer,
                        top_logprobs=request.top_logprobs,
                        metadata={"agent": agent},
                        on_tokens=None if text is None else on_tokens,
                    )
                )
        except ConfigError as error:
            too_long = isinstance(error, ContextOverflowError)
            code = "context_length_exceeded" if too_long else None
            raise RequestError(str(error)[:500], param="messages", code=code) from error
        response = SharedPromptResponse.of(response, prefix)
        answer = self._read(request, response, answer_id, stops, thinking=thinking)
        if text is not None and on_text is not None:
            message = answer.message
            for piece in text.finish(message["content"] or "", message.get("reasoning_content") or ""):
                on_text(index, piece)
        if not self._closed:
            if is_fork:
                self.forks += 1
                self.forked_tokens += self._tokens_left(prompt)
            else:
                self.clean_turns += 1
            self._record(
                request,
                InteractionWithTokenLogpReward(
                    model_response=response,
                    parent=parent,
                    messages=request.messages,
                    output_message_list=[answer.message],
                    completion={"id": answer_id},
                ),
            )
        return answer

    async def _find_prompt(
        self, request: ChatRequest
    ) -> tuple[TokenPrefix, InteractionWithTokenLogpReward | None, bool]:
        """Return the prompt's ids, the answer they extend, and whether the prompt renders an answer from text."""
        if request.prompt is not None:
            return *await self._raw_prompt(request.prompt), False
        parent, known = self._longest_recorded(request)
        new = request.messages[known:]
        prompt, parent = await self._prompt(request, parent, new)
        if parent is None:
            new = request.messages
        is_fork = bool(self.interactions) and any(message["role"] == "assistant" for message in new)
        return prompt, parent, is_fork

    async def _raw_prompt(self, prompt: str | list[int]) -> tuple[TokenPrefix, InteractionWithTokenLogpReward | None]:
        """Return the ids of a prompt without template, and the answer that it continues exactly."""
        parent, rest, longest = None, prompt, 0
        for text, answer in self._raw:
            before, sampled = answer.model_response.prompt, answer.model_response.output_tokens
            length = before.length + len(sampled)
            if length <= longest:
                continue
            if isinstance(prompt, str):
                extends = prompt.startswith(text)
            else:
                extends = prompt[before.length : length] == sampled and prompt[: before.length] == before.tolist()
            if extends:
                parent, rest, longest = answer, prompt[len(text) if isinstance(prompt, str) else length :], length
        added = list(rest) if isinstance(rest, list) else await self._renderer.plain(rest, begins=parent is None)
        if parent is None:
            return TokenPrefix(added, len(added)), None
        recorded = parent.model_response
        return recorded.prompt.extended(recorded.output_tokens + added), parent

    def _text_stream(self, request: ChatRequest, thinking: bool, stops: list[str]) -> TextStream:
        def decode(ids: list[int]) -> str:
            return self._renderer.visible_text(
                ids, skip_special_tokens=self._gconfig.skip_special_tokens, tools=request.parse_tools
            )

        parser = self._renderer.answer_parser
        reasons = parser.splits_reasoning and request.prompt is None
        stream = TextStream(
            decode,
            stops=stops,
            openings=parser.starts if request.parse_tools else (),
            json_waits=request.parse_tools and parser.tool_format.bare_json,
            thinking=thinking if reasons else None,
        )
        if request.parse_tools and request.grammar:  # the answer is a call as bare JSON
            stream.wait()
        return stream

    def _opens_thinking(self, request: ChatRequest, prompt: list[int]) -> bool:
        """Return whether the answer begins with reasoning; under a grammar it has none."""
        return not request.grammar and self._renderer.opens_thinking(prompt)

    def parse(self, body: bytes) -> ChatRequest:
        """Return the checked request of a chat completion; messages that an earlier body had are not parsed again.

        Raises:
            RequestError: With status 400.
        """
        for earlier in sorted(self._conversations, key=lambda one: len(one.raw), reverse=True):
            if earlier.beginning is not None and (rest := earlier.beginning.cut_from(body)) is not None:
                return parse_chat_request(json_object(rest), extends=earlier, sent=body)
        return parse_chat_request(json_object(body), self.find_conversation, sent=body)

    def find_conversation(self, raw: list[Any]) -> Conversation | None:
        """Return the longest earlier conversation that the messages of a request begin with.

        Comparing lists is a fraction of the cost of parsing them, so a turn costs the same at the end of a long
        conversation as at its beginning.
        """
        found = None
        for one in self._conversations:
            count = len(one.raw)
            if (found is None or count > len(found.raw)) and raw[:count] == one.raw:
                found = one
        return found

    def _start(self, request: ChatRequest) -> _Node:
        """Return the node of what the request extends, or the root of its tree."""
        key = request.render_key
        if request.extends is not None and request.extends.place.root == key:
            node: _Node = request.extends.place
            return node
        return self._roots.setdefault(key, _Node(key))

    def _longest_recorded(self, request: ChatRequest) -> tuple[InteractionWithTokenLogpReward | None, int]:
        """Return the answer that ends the longest recorded prefix of a request, and the prefix's length."""
        node = self._start(request)
        for place in range(node.depth, len(request.keys)):
            child = node.children.get(request.keys[place])
            if child is None:
                break
            node = child
        while node.interaction is None and node.before is not None and (before := node.before()) is not None:
            node = before
        return node.interaction, node.depth

    def _tokens_left(self, prompt: list[int]) -> int:
        """Return how many tokens of the closest earlier conversation a prompt does not share."""
        shared, left = -1, 0
        in_common: dict[int, int] = {}  # of the prompt and each list of ids
        for answer in self.interactions.values():
            before, sampled = answer.model_response.prompt, answer.model_response.output_tokens
            place, length = id(before.ids), before.length
            if place not in in_common:
                in_common[place] = _shared_length(prompt, before.ids)
            common = min(in_common[place], length)
            if common == length:
                common += _shared_length(prompt[length : length + len(sampled)], sampled)
            if common > shared:
                shared, left = common, length + len(sampled) - common
        return left

    def _record(self, request: ChatRequest, interaction: InteractionWithTokenLogpReward) -> None:
        (answer,) = interaction.output_message_list
        self.interactions[interaction.completion["id"]] = interaction
        if request.prompt is not None:
            response = interaction.model_response
            ids = response.input_tokens + response.output_tokens
            self._raw.append((self._renderer.decode(ids, skip_special_tokens=False), interaction))
            return
        start = self._start(request)
        node = start.grow(request.keys[start.depth :])
        _, key = parse_message(answer, "answer")
        end = node.grow([key])
        end.interaction = interaction
        node.children.setdefault(without_reasoning(key), end)  # a client may leave the reasoning out
        if not any(one.place is node for one in self._conversations):
            if request.extends is not None and request.extends in self._conversations:
                self._conversations.remove(request.extends)
            self._conversations.append(
                Conversation(
                    body=request.body,
                    known=request.extends.beginning if request.extends else None,
                    raw=request.raw,
                    messages=request.messages,
                    keys=request.keys,
                    place=node,
                )
            )

    async def _prompt(
        self, request: ChatRequest, parent: InteractionWithTokenLogpReward | None, new: list[dict[str, Any]]
    ) -> tuple[TokenPrefix, InteractionWithTokenLogpReward | None]:
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
                return recorded.prompt.extended(recorded.output_tokens + added), parent
            except RequestError:
                logger.debug("the new messages cannot be rendered alone", exc_info=True)
        if self._prompt_ids is not None and not self.interactions:
            ids = list(self._prompt_ids)  # it grows with the conversation
        else:
            ids = await self._renderer.prompt(request.messages, request.tools, request.template_kwargs)
        return TokenPrefix(ids, len(ids)), None

    def _read(
        self, request: ChatRequest, response: ModelResponse, answer_id: str, stops: list[str], *, thinking: bool
    ) -> Answer:
        """Return the answer with its message, a view of the ids."""
        text = self._renderer.visible_text(
            response.output_tokens,
            skip_special_tokens=self._gconfig.skip_special_tokens,
            tools=request.parse_tools,
            ended=True,
        )
        stopped_by = min((stop for stop in stops if stop in text), key=text.index, default=None)
        if stopped_by is not None:
            text = text.partition(stopped_by)[0]
        if request.prompt is None:
            parsed = self._renderer.answer_parser.parse(
                text,
                request.tools if request.parse_tools else None,
                thinking=thinking,
                bare_json=bool(request.grammar),
            )
        else:
            parsed = ParsedAnswer(text)
        self.tool_calls += len(parsed.tool_calls)
        self.tool_parse_errors += parsed.unparsable
        finish_reason: Any = "stop" if response.stop_reason in ("stop", "tool_calls") else "length"
        return Answer(
            id=answer_id,
            message=parsed.message(),
            finish_reason="tool_calls" if parsed.tool_calls else finish_reason,
            stopped_by=stopped_by,
            response=response,
        )

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone, special tokens included."""
        return [self._renderer.decode([token], skip_special_tokens=False) for token in ids]

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


def _shared_length(first: list[int], second: list[int]) -> int:
    """Return the length of the common beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
