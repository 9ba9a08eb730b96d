"""Runs a dumped episode again from a turn: earlier model calls get the dumped answers, later ones are sampled.

An episode is code, so its workflow is run again from the start. Guarantees that all tokens before the turn are those of
the dump: a workflow that does not repeat them is stopped, and :attr:`Continuation.difference` says where.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Self, cast
from areal_lite.agents.agent_workflow import AgentWorkflow
from areal_lite.agents.session.chat_history import shared_length
from areal_lite.agents.session.chat_renderer import ChatRenderer, Rendered
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.image_span import Images, keyed_ids
from areal_lite.api.io_struct import ModelRequest, ModelResponse
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.data.vision.image_encoder import with_spans
from areal_lite.errors import ConfigError
from areal_lite.tools.inspect.dumped_images import dumped_images


class DumpedCall(NamedTuple):
    """A model call of a dumped episode."""

    path: tuple[int, ...]
    """Its turn and all before it, as ``turn_idx``."""
    starts: tuple[int, ...]
    prompt: tuple[int, ...]
    turn: Mapping[str, Any]
    images: Images = ()

    @property
    def keys(self) -> list[int]:
        """The prompt's ids, in which those of an image are its own."""
        return keyed_ids(self.prompt, self.images)

    def answer(self) -> ModelResponse:
        turn = self.turn
        return ModelResponse(
            input_tokens=list(self.prompt),
            output_tokens=list(turn["ids"]),
            output_logprobs=[0.0 if value is None else value for value in turn["logprobs"]],
            output_versions=list(turn["versions"]),
            stop_reason=turn["stop_reason"] or "stop",
            images=self.images,
        )


class Fork(NamedTuple):
    """The point at which an episode is continued."""

    turn: int
    kept: list[DumpedCall]
    """Calls before the turn, in the order they began."""
    first: DumpedCall
    later: list[DumpedCall]
    """Calls after it."""
    num_fixed: int
    """Tokens of the first call's prompt that come before the turn."""

    @classmethod
    def at(cls, lines: Sequence[Mapping[str, Any]], turn: int) -> Self:
        """Return the fork of an episode at a turn."""
        turns = {each["turn_idx"]: each for line in lines for each in line["turns"]}
        if turn not in turns:
            raise ConfigError(f"--turn {turn}: the episode has the turns {', '.join(map(str, sorted(turns)))}")
        calls = [_call(index, turns) for index, each in sorted(turns.items()) if each["role"] == "assistant"]
        if all(call.turn.get("started") is not None for call in calls):
            calls.sort(key=lambda call: call.turn["started"])
        first_new = next((number for number, call in enumerate(calls) if turn in call.path), None)
        if first_new is None:
            raise ConfigError(
                f"--turn {turn}: no model call follows it, so nothing would be sampled: name an earlier turn"
            )
        first = calls[first_new]
        return cls(turn, calls[:first_new], first, calls[first_new + 1 :], first.starts[first.path.index(turn)])


def _call(index: int, turns: Mapping[int, Mapping[str, Any]]) -> DumpedCall:
    path = [index]
    while (parent := turns[path[0]]["parent_idx"]) is not None:
        path.insert(0, parent)
    return DumpedCall(
        path=tuple(path),
        starts=tuple(turns[each]["start"] for each in path),
        prompt=tuple(token for each in path[:-1] for token in turns[each]["ids"]),
        turn=turns[index],
        images=tuple(image.moved(turns[each]["start"]) for each in path[:-1] for image in dumped_images(turns[each])),
    )


class Continuation(RolloutWorkflow):
    """Runs ``workflow`` with the dumped answers before a fork."""

    def __init__(self, workflow: RolloutWorkflow, fork: Fork, tokenizer: Any, *, say: str | None = None) -> None:
        if say is not None and not isinstance(workflow, AgentWorkflow):
            raise ConfigError(
                f"--say replaces a message of an agent, and {type(workflow).__name__} writes its own prompts: leave "
                "--say out"
            )
        self.difference: str | None = None
        """First difference between the rerun and the dump; None without one."""
        self.fork, self.say, self._workflow, self._tokenizer = fork, say, workflow, tokenizer

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        """Run the workflow; an episode that differs from the dump fails."""
        episode = episode_context.current().episode
        assert episode is not None
        for call in self.fork.kept:
            episode.record(call.answer())
        rerun = _Rerun(self, engine)
        _rerun.set(rerun)
        agent = self._workflow
        if self.say is not None and isinstance(agent, AgentWorkflow):
            agent.renderer = _SayingRenderer(await agent.load_renderer(), self.say)
        returned = await agent.arun_episode(cast(InferenceEngine, rerun), data)
        if rerun.pending:
            raise self.stop(f"the agent ended without the model call of turn {rerun.pending[0].path[-1]}")
        return returned

    def stop(self, difference: str) -> ConfigError:
        """Keep the first difference, and return it as an error."""
        self.difference = self.difference or (
            f"{difference}. To be continued, an agent must make its calls again: no clock, no randomness, and tools "
            "that answer the same"
        )
        return ConfigError(self.difference)

    def differs(self, req: ModelRequest, expected: Sequence[DumpedCall]) -> str:
        """Return where a prompt differs from the most similar of the expected ones."""
        keys = keyed_ids(req.input_ids, req.images)
        call = max(expected, key=lambda call: shared_length(call.keys, keys))
        at = shared_length(call.keys, keys)
        then, now = self._said(call.prompt, call.images, at), self._said(req.input_ids, req.images, at)
        turn = [turn for turn, start in zip(call.path[:-1], call.starts, strict=False) if start <= at][-1]
        where = f"turn {turn} is not repeated: from token {at} on"
        return f"{where} the dump has {then!r}, and the agent sends {now!r}"

    def _said(self, ids: Sequence[int], images: Images, at: int) -> str:
        image = next((image for image in images if image.offset <= at < image.end), None)
        text: str = self._tokenizer.decode(list(ids[at : at + 24]))
        return text if image is None else f"image {image.sha256[:12]}"


_rerun: "ContextVar[_Rerun | None]" = ContextVar("areal_lite_rerun", default=None)


class _Rerun:
    """The engine of one continued episode: compares its calls with the dump and passes everything on."""

    def __init__(self, continuation: Continuation, engine: InferenceEngine) -> None:
        self.pending = list(continuation.fork.kept)
        """Kept calls that were not made yet."""
        self.sampled = False
        """True once there is a new answer; everything after it may differ."""
        self._continuation, self._engine = continuation, engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        if req.image_data:
            req = await with_spans(req, cast(Any, self._engine).config)
        keys = keyed_ids(req.input_ids, req.images)
        kept = next((call for call in self.pending if call.keys == keys), None)
        if kept is None:
            self._check_new(req, keys)
        else:
            self.pending.remove(kept)
            if req.top_logprobs:
                raise self._continuation.stop(
                    f"turn {kept.path[-1]} was dumped without the {req.top_logprobs} top log-probs that the agent "
                    "asks for"
                )
        response = await self._engine.agenerate(req)
        self.sampled = self.sampled or kept is None
        return response

    def _check_new(self, req: ModelRequest, keys: list[int]) -> None:
        """Stop the episode unless this may be the first new call, or comes after it."""
        continuation, fork = self._continuation, self._continuation.fork
        if self.sampled or any(keys == call.keys for call in (fork.first, *fork.later)):
            return
        fixed = fork.num_fixed
        if continuation.say is not None:  # the turn before the call has another text
            fixed = min(fixed, fork.first.starts[-2])
        if fixed == len(fork.first.prompt) or keys[:fixed] != fork.first.keys[:fixed]:
            raise continuation.stop(continuation.differs(req, self.pending or [fork.first]))


class _SayingRenderer(ChatRenderer):
    """A renderer that replaces the last user message of the first new call of each episode."""

    def __init__(self, renderer: ChatRenderer, say: str) -> None:
        self.__dict__ |= vars(renderer)
        self._say = say

    async def prompt(self, messages: list[dict[str, Any]], *rest: Any) -> Rendered:
        return await super().prompt(self._replaced(messages), *rest)

    async def continuation(
        self, answer: list[int], ended: bool, messages: list[dict[str, Any]], *rest: Any
    ) -> Rendered:
        return await super().continuation(answer, ended, self._replaced(messages), *rest)

    def _replaced(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rerun = _rerun.get()
        if rerun is None or rerun.pending or rerun.sampled:
            return messages
        last = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None:
            raise ConfigError(
                "--say replaces the last user message, and none comes between the last kept answer and --turn: leave "
                "--say out, or name a turn after a user message"
            )
        return [*messages[:last], {**messages[last], "content": self._say}, *messages[last + 1 :]]
