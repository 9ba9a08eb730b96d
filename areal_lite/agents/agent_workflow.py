"""The workflow around an agent: opens a session, runs the agent, and turns what it returns into rewards."""

import asyncio
import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.http_transport import socket_client
from areal_lite.agents.doors.listener import Listener
from areal_lite.agents.isolation.agent_access import AgentAccess
from areal_lite.agents.isolation.agent_processes import pickled_agent, run_in_process
from areal_lite.agents.isolation.agent_thread import run_in_thread
from areal_lite.agents.isolation.episode_processes import EpisodeProcesses
from areal_lite.agents.isolation.misrouted_call import explain_misrouted_call
from areal_lite.agents.session.chat_history import Interactions
from areal_lite.agents.session.chat_renderer import ChatRenderer, chat_renderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api import episode_context
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.failure import FailureKind, attributed_to
from areal_lite.api.reward_value import as_reward
from areal_lite.api.shared_resources import SharedResources
from areal_lite.api.workflow_api import RolloutWorkflow
from areal_lite.config.rollout_config import InferenceEngineConfig, RewardsConfig
from areal_lite.data.chat.tokenizer import load_tokenizer
from areal_lite.data.vision.image_encoder import image_encoder
from areal_lite.errors import ConfigError, ContextOverflowError
from areal_lite.processes.call_pool import CallPool


class AgentWorkflow(RolloutWorkflow):
    """Runs any object with ``async def run(self, data, **extra_kwargs)`` as a workflow.

    ``run`` gets ``base_url``, ``api_key`` and ``http_client`` for an OpenAI SDK client; they work together, and
    ``base_url`` and ``api_key`` also alone, from any thread, process or language on this machine. SDK clients made
    without arguments find them in the environment. ``workflow_context.get().agent`` has the same for Anthropic's API,
    the environment of a subprocess, and ``run_process`` for an agent in another program.

    ``config.agents.isolation`` says where ``run`` is called: on the event loop, in a thread or in a process. Only in
    the last two may it block; it may then also be a plain function, whose ``http_client`` is a sync one.

    ``run`` returns the reward (:func:`rewarded`); None rejects the episode. One object runs all episodes, so it must
    keep no state between them.

    Training episodes sample with ``config.gconfig``, whatever the agent requests. In evaluation the agent's temperature
    and top_p apply; ``config.eval_gconfig`` sets what it leaves out.
    """

    def __init__(self, agent: Any, config: InferenceEngineConfig) -> None:
        self.agent = agent
        self._config = config
        self.renderer: ChatRenderer | None = None
        """Renders the messages of all sessions; None until the first episode."""
        self._loading = asyncio.Lock()
        self._pickled = pickled_agent(agent) if config.agents.isolation == "process" else None

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Interactions | None:
        """Run the agent on one row. An engine that failed at its last call is an error, even if the agent caught it."""
        context = episode_context.current()
        is_eval = context.is_eval
        renderer = self.renderer or await self.load_renderer()
        shared = context.shared or SharedResources()
        doors = await shared.get("agents", lambda: Listener(AgentService()).open(shared))
        session = ChatSession(
            engine, renderer, self._config.eval_gconfig if is_eval else self._config.gconfig, agent_samples=is_eval
        )
        access = replace(doors.access(doors.service.open(session)), sandbox=self._config.agents.sandbox)
        processes = EpisodeProcesses(access.api_key)
        try:
            with access.given():
                reward = await self._run_agent(data, access, session, shared)
            await session.settle()
        except Exception as error:
            if session.error is not None:
                raise session.error from error
            if session.refusal is not None and session.refusal.code == "context_length_exceeded":
                raise ContextOverflowError(str(session.refusal)) from error
            if session.refusal is None:
                explain_misrouted_call(error, access.base_url)
            raise
        finally:
            episode_context.record_counts(session.counts())
            doors.service.close(access.api_key)
            if (killing := processes.end()) is not None:
                await asyncio.shield(asyncio.wrap_future(killing))
            if context.shared is None:
                await shared.aclose()
        if session.error is not None:  # a reward after a failed call says nothing about the model
            raise session.error
        if reward is None:
            return None
        if not session.interactions:
            cause = f"; its call was refused: {session.refusal}" if session.refusal else ""
            raise ValueError(
                "the agent called no model, so there is nothing to train: make its client with the base_url, api_key "
                f"and http_client that run() is given, or return None to reject the episode{cause}"
            )
        with attributed_to(FailureKind.REWARD):
            sequences, parts = rewarded(session, reward, self._config.rewards, self._config.agents.train_agents)
        if not sequences:
            raise ValueError(
                f"no answer is of rollout.agents.train_agents {self._config.agents.train_agents}: the episode's agents "
                f"are {sorted({str(each.model_response.metadata['agent']) for each in session.interactions.values()})}"
            )
        episode_context.record_counts({f"reward/{name}": value for name, value in parts.items()})
        return sequences

    async def _run_agent(
        self, data: dict[str, Any], access: AgentAccess, session: ChatSession, shared: SharedResources
    ) -> Any:
        if self._pickled is not None:

            async def processes() -> CallPool:
                return CallPool(self._config.agents.processes or 2 * (os.cpu_count() or 1))

            pool = await shared.get("agent_processes", processes)
            return await run_in_process(pool, self._pickled, data, access, episode_context.current())

        def call(http_client: Any = access.http_client) -> Any:
            return self.agent.run(data, base_url=access.base_url, api_key=access.api_key, http_client=http_client)

        if self._config.agents.isolation == "inline":
            return await call()

        def call_sync() -> Any:
            with socket_client(is_async=False) as client:
                return call(client)

        context = episode_context.current()
        episode_context.enter(context._replace(shared=None))  # what episodes share belongs to this event loop
        return await run_in_thread(
            call if inspect.iscoroutinefunction(self.agent.run) else call_sync,
            name=f"{type(self.agent).__name__}, task {context.task_id}, episode {context.member_idx}",
            stop=session.close,
            shared=shared,
        )

    async def load_renderer(self) -> ChatRenderer:
        """Return :attr:`renderer`, loaded on the first call."""
        if (path := self._config.tokenizer_path) is None:
            raise ConfigError(
                "rollout.tokenizer_path is null: an agent's messages need a tokenizer; name the folder of the "
                "served model's tokenizer"
            )
        async with self._loading:
            if self.renderer is None:
                tokenizer = await asyncio.to_thread(load_tokenizer, path)
                self.renderer = chat_renderer(
                    tokenizer,
                    tool_parser=self._config.agents.tool_parser,
                    reasoning_parser=self._config.agents.reasoning_parser,
                    tools_in_system_prompt=self._config.agents.tools_in_system_prompt,
                    images=await asyncio.to_thread(image_encoder, path, tokenizer, self._config.run_dir),
                )
        return self.renderer


def rewarded(
    session: ChatSession, reward: Any, config: RewardsConfig, agents: Sequence[str] | None = None
) -> tuple[Interactions, dict[str, float]]:
    """Return an ended session's sequences that train ``agents``, with rewards, and the parts of the reward by name.

    | ``run()`` returns | rewards |
    |---|---|
    | a number | the episode; all answers are trained as conversations |
    | a dict by completion id | these answers, each a sequence of its own; others are not trained; the episode by \
    ``rollout.turn_rewards`` |
    | a list with a number or None per answer, in the order of their requests | the same, by index |
    | a dict by name of ``rollout.rewards.weights`` | the episode with the weighted sum |
    | a dict with ``rollout.rewards.key`` | the episode with that part; other parts may also be text |

    Raises:
        ValueError: If it is none of these.
    """
    weights, key, parts = config.weights, config.key, {}
    by_answer: Mapping[Any, Any] | None = None
    if isinstance(reward, Mapping):
        if not reward:
            raise ValueError("run() returned an empty dict: return None to reject the episode")
        if key is not None and key in reward:
            numbers = {str(name): value for name, value in reward.items() if not isinstance(value, str | None)}
            parts = {name: as_reward(value) for name, value in numbers.items()}
            reward = reward[key]
        elif weights and reward.keys() <= weights.keys():
            parts = {str(name): as_reward(value) for name, value in reward.items()}
            reward = sum(weights[name] * value for name, value in parts.items())
        else:
            by_answer = reward
    elif isinstance(reward, Sequence) and not isinstance(reward, str | bytes):
        ids = [name for name in session.asked if name in session.interactions]
        if len(reward) != len(ids):
            raise ValueError(
                f"run() returned {len(reward)} rewards for {len(ids)} answers: return one number or None for each"
            )
        by_answer = {name: value for name, value in zip(ids, reward, strict=True) if value is not None}
        if not by_answer:
            raise ValueError("run() rewards no answer: return None to reject the episode")
    if by_answer is None:
        total = as_reward(reward)
        answers = session.history.export("concat", agents)
        return {name: replace(answer, reward=total, episode_reward=total) for name, answer in answers.items()}, parts
    if unknown := [name for name in by_answer if name not in session.interactions]:
        raise ValueError(
            f"run() rewards {unknown[0]!r}, which is not one of its completions: {list(session.interactions)}; "
            f"rollout.rewards.weights names {list(weights) if weights else 'no parts of a reward'}"
        )
    answers = session.history.export("individual", agents)
    given = {name: answer for name, answer in answers.items() if name in by_answer}
    return {name: replace(answer, reward=as_reward(by_answer[name])) for name, answer in given.items()}, parts
