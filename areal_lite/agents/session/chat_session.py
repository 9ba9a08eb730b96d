"""One episode's conversation with the model: requests in, answers out, tokens recorded.

Guarantees: sampled ids, log-probs and versions are kept as the engine returned them and are never tokenized again. A
request whose messages begin with an earlier request and its answer is generated from the recorded ids of both plus the
newly rendered messages, so the two are one sequence. Whatever else a client sends starts a sequence of its own.
``chat_history`` says how that is decided.

Calls of one session may run concurrently, in tasks of the episode and of a listener's connection. So an answer awaits
twice, for its prompt and for the engine, and all else happens between awaits: the agent's name is taken before the
first one, because the first agent to call is ``main``, and counting and recording are one step after the last. The
history may grow between the two, which is harmless: the parent was found before, and records are only added. If the
episode ends in between, its session is closed and its sequences taken: the answer is returned but not recorded.
"""

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NamedTuple
from areal_lite.agents.session.chat_answer import AnswerReader, ChatAnswer, Piece
from areal_lite.agents.session.chat_history import ChatHistory
from areal_lite.agents.session.chat_renderer import ChatRenderer, Rendered
from areal_lite.agents.session.chat_request import ChatRequest
from areal_lite.agents.session.request_fields import RequestError
from areal_lite.agents.session.request_images import RequestImages, image_parts
from areal_lite.api import episode_context
from areal_lite.api.engine_api import OLDER_POLICY, InferenceEngine
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.image_span import Images
from areal_lite.api.interaction import InteractionWithTokenLogpReward
from areal_lite.api.io_struct import ModelRequest, ModelResponse, SharedPromptResponse, TokenPrefix
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.errors import ConfigError, ContextOverflowError

logger = logging.getLogger(__name__)
OnText = Callable[[int, Piece], None]
CUT = ("length", "abort")
"""Stop reasons of answers that the model did not end."""
SETTLE_S = 2.0
"""Seconds that an episode's end waits for answers whose clients have left."""
_NAME_WORDS, _NAME_CHARACTERS = 6, 60


class _Prompt(NamedTuple):
    prefix: TokenPrefix
    images: Images
    parent: InteractionWithTokenLogpReward | None  # the answer that it extends
    is_fork: bool  # it renders an answer from text


@dataclass(eq=False)
class ChatSession:
    engine: InferenceEngine
    renderer: ChatRenderer
    gconfig: GenerationHyperparameters
    agent_samples: bool = False
    prompt_ids: list[int] | None = None

    def __post_init__(self) -> None:
        stop_ids = dict.fromkeys([*(self.gconfig.stop_token_ids or []), *self.renderer.stop_ids])
        self.gconfig = self.gconfig.new(stop_token_ids=list(stop_ids) or None)
        self._names = AgentNames()
        self._closed = False
        self._context = episode_context.current()
        self._tasks: set[asyncio.Task[Any]] = set()
        """Running calls that no task of the episode waits for."""
        self._left: set[asyncio.Task[None]] = set()
        """Those whose clients have left."""
        self.history = ChatHistory()
        self.images = RequestImages(self.renderer.images)
        self.interactions = self.history.interactions
        self.asked: list[str] = []  # ids of answers in the order of their requests
        self.responses: dict[str, dict[str, Any]] = {}
        """Replies of the Responses API, by id; an agent may read and delete them."""
        self.clean_turns = self.forks = self.forked_tokens = self.tool_calls = self.tool_parse_errors = 0
        self.cut_answers = 0
        self.error: Exception | None = None
        """The engine's error in the latest call; None if that succeeded."""
        self.refusal: RequestError | None = None

    async def answer(self, request: ChatRequest, answer_id: str, *, on_text: OnText | None = None) -> list[ChatAnswer]:
        """Return the answers to a request: ``options.n`` to each of its prompts."""
        with self._inside_episode():
            try:
                await self.images.store(request.messages)
                first, *others = request.choices
                if not others:
                    answers = [await self._answer(first, 0, answer_id, on_text)]
                else:
                    async with asyncio.TaskGroup() as tasks:
                        choices = [self._answer(first, 0, answer_id, on_text)]
                        choices += [self._answer(e, k, f"{answer_id}-{k}", on_text) for k, e in enumerate(others, 1)]
                        running = [tasks.create_task(choice) for choice in choices]
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
            self.error = self.refusal = None
            return answers

    @contextlib.contextmanager
    def _inside_episode(self) -> Iterator[None]:
        """Run a call that came through a socket or a thread as a part of the episode, which ends it."""
        if episode_context.current().episode is self._context.episode:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        outside = episode_context.enter(self._context)
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._closed and not task.uncancel():
                raise RequestError("the episode has ended", status=410, code="session_ended") from None
            raise
        finally:
            self._tasks.discard(task)
            episode_context.leave(outside)

    def counts(self) -> dict[str, float]:
        names = ("clean_turns", "forks", "forked_tokens", "tool_calls", "tool_parse_errors", "cut_answers")
        return {"answers": float(len(self.interactions)), **{name: float(getattr(self, name)) for name in names}}

    async def count_tokens(self, request: ChatRequest) -> int:
        await self.images.store(request.messages)
        return (await self._find_prompt(request)).prefix.length

    async def settle(self) -> None:
        """Wait until the answers whose clients have left are recorded; those that take too long are lost."""
        leaving = [task for task in self._tasks if task.cancelling()]
        for tasks in (leaving, self._left):  # the first add to the second as they end
            if tasks:
                await asyncio.wait(tasks, timeout=SETTLE_S)

    def own(self, task: asyncio.Task[Any]) -> None:
        """Cancel ``task`` when the session closes."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """End the session: running calls stop, and later answers are not recorded."""
        self._closed = True
        for task in self._tasks:
            task.cancel()

    async def _answer(self, request: ChatRequest, index: int, answer_id: str, on_text: OnText | None) -> ChatAnswer:
        self.asked.append(answer_id)
        agent = self._names.name(request)  # before other calls may run: the first one is the main agent's
        prefix, images, parent, is_fork = await self._find_prompt(request)
        prompt = prefix.tolist()
        text_of_choice = None if on_text is None else functools.partial(on_text, index)
        reader = AnswerReader(self.renderer, request, prompt, self.gconfig, text_of_choice)
        gconfig = request.options.gconfig(
            self.gconfig,
            request.grammar,
            choice=index % request.options.n,
            prompt_tokens=len(prompt),
            agent_samples=self.agent_samples or agent == OLDER_POLICY,
        )
        asked = ModelRequest(
            input_ids=prompt,
            prefix=prefix,
            images=images,
            gconfig=gconfig,
            tokenizer=self.renderer.tokenizer,
            top_logprobs=request.options.top_logprobs,
            metadata={"agent": agent},
            on_tokens=None if on_text is None else reader.on_tokens,
        )

        def finish(response: ModelResponse) -> ChatAnswer:
            response.images = images
            answer = reader.read(SharedPromptResponse.of(response, prefix), answer_id)
            self.tool_calls += len(answer.message.get("tool_calls") or ())
            self.tool_parse_errors += answer.unparsable
            if not self._closed:
                if is_fork:
                    self.forks += 1
                    self.forked_tokens += self.history.tokens_left(prompt)
                else:
                    self.clean_turns += 1
                self._record(request, answer, parent)
            return answer

        call = asyncio.create_task(self._generate(asked))
        try:
            return finish(await asyncio.shield(call))
        except asyncio.CancelledError:
            self.own(call)
            if self._closed:
                call.cancel()
            else:
                self._left.add(task := asyncio.create_task(self._keep(call, asked.rid, finish)))
                task.add_done_callback(self._left.discard)
                self.own(task)
            raise

    async def _keep(
        self, call: asyncio.Task[ModelResponse], rid: str, finish: Callable[[ModelResponse], ChatAnswer]
    ) -> None:
        """Record what was sampled of an answer whose client has left: it closed the stream, or its time was over."""
        if not await self.engine.cut_short(rid):
            call.cancel()
        with contextlib.suppress(Exception):  # an error that nobody waits for
            if (response := await call).output_tokens:
                finish(response)
                self.cut_answers += 1

    async def _generate(self, request: ModelRequest) -> ModelResponse:
        try:
            with attributed_to(FailureKind.ENGINE):
                return await self.engine.agenerate(request)
        except ConfigError as error:
            code = "context_length_exceeded" if isinstance(error, ContextOverflowError) else None
            raise RequestError(str(error)[:500], param="messages", code=code) from error

    def _record(self, request: ChatRequest, answer: ChatAnswer, parent: InteractionWithTokenLogpReward | None) -> None:
        message = answer.message
        if request.begun is not None:  # the next request has both in one message
            message = {**message, "content": request.begun + (message.get("content") or "")}
            request = request.without_last()
        interaction = InteractionWithTokenLogpReward(
            model_response=answer.response,
            parent=parent,
            messages=request.messages,
            output_message_list=[message],
            completion={"id": answer.id},
        )
        if not request.prompts:
            self.history.record(request, interaction)
        else:
            ids = answer.response.input_tokens + answer.response.output_tokens
            self.history.record_untemplated(self.renderer.decode(ids), interaction)

    async def _find_prompt(self, request: ChatRequest) -> _Prompt:
        if request.prompts:
            parent, rest = self.history.longest_untemplated(request.prompts[0])
            added = list(rest) if isinstance(rest, list) else await self.renderer.plain(rest, begins=parent is None)
            return _extended(parent, Rendered(added), False)
        parent, known = self.history.longest_recorded(request)
        if request.begun is not None:
            if parent is not None and known == len(request.messages) and parent.model_response.stop_reason in CUT:
                return _extended(parent, Rendered([]), False)
            before = await self._find_prompt(request.without_last())
            ids = before.prefix.extended(await self.renderer.plain(request.begun, begins=False))
            return before._replace(prefix=TokenPrefix(ids.ids, ids.length, before.prefix.num_accepted))
        new, rendered = request.messages[known:], Rendered([])
        if parent is not None:
            recorded = parent.model_response
            ended = recorded.stop_reason not in CUT
            try:
                rendered = await self.renderer.continuation(
                    recorded.output_tokens, ended, new, request.tools, request.template_kwargs
                )
            except RequestError:  # templates that reject or drop parts of a conversation: render the whole one
                logger.debug("the new messages cannot be rendered alone", exc_info=True)
                parent, new = None, request.messages
        first = parent is None and not self.interactions
        if first and self.prompt_ids is not None and not image_parts(new):
            rendered = Rendered(list(self.prompt_ids))  # it grows with the conversation
        elif parent is None:
            rendered = await self.renderer.prompt(request.messages, request.tools, request.template_kwargs)
        is_fork = bool(self.interactions) and any(message["role"] == "assistant" for message in new)
        return _extended(parent, rendered, is_fork)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token alone, special tokens included."""
        return [self.renderer.decode([token]) for token in ids]


def _extended(parent: InteractionWithTokenLogpReward | None, new: Rendered, is_fork: bool) -> _Prompt:
    if parent is None:
        return _Prompt(TokenPrefix(new.ids, len(new.ids)), new.images, None, is_fork)
    before = parent.model_response
    images = before.images + tuple(span.moved(before.input_len + before.output_len) for span in new.images)
    return _Prompt(before.prompt.extended(before.output_tokens + new.ids), images, parent, is_fork)


class AgentNames:
    def __init__(self) -> None:
        self._names: dict[tuple[str, ...], str] = {}
        """Names per system prompt, the main agent's first."""

    def name(self, request: ChatRequest) -> str:
        """Return the agent that sent a request: its ``metadata.agent``, or the ``name`` of its system message.
        Otherwise the first system prompt is ``main``, and another is named by its first words that differ."""
        system = list(takewhile(lambda message: message["role"] == "system", request.messages))
        given = request.options.agent or next((message["name"] for message in system if "name" in message), "")
        if given and (given := _shortened(given.split())):
            return given
        key = tuple(str(message["content"]) for message in system)  # of parts, if it has an image
        if key not in self._names:
            self._names[key] = self._new_name(key)
        return self._names[key]

    def _new_name(self, key: tuple[str, ...]) -> str:
        if not self._names:
            return "main"
        words, main = _words(key), _words(next(iter(self._names)))
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(words, main, strict=False)))
        name = _shortened((words[shared:] or words)[:_NAME_WORDS]) or "no system prompt"
        return f"{name} {len(self._names) + 1}" if name in self._names.values() else name


def _words(key: tuple[str, ...]) -> list[str]:
    return "\n".join(key)[:4000].split()


def _shortened(words: list[Any]) -> str:
    return " ".join(words)[:_NAME_CHARACTERS].rstrip()
