"""AReaL's client: an OpenAI SDK client that generates with the engine and keeps what it sampled.

For workflows that call the model. Agents with ``async run()`` use the plain SDK. The nine parameters are AReaL's.
"""

from functools import partial
from typing import Any
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion
from areal_lite.agents.doors.agent_service import AgentService
from areal_lite.agents.doors.http_transport import BASE_URL, SharedClient
from areal_lite.agents.parsers.tool_formats import TOOL_FORMATS
from areal_lite.agents.session.chat_history import Interactions, Style
from areal_lite.agents.session.chat_renderer import chat_renderer
from areal_lite.agents.session.chat_session import ChatSession
from areal_lite.api.engine_api import InferenceEngine
from areal_lite.api.episode_context import record_counts
from areal_lite.api.interaction import InteractionWithTokenLogpReward, pass_rewards_back
from areal_lite.api.reward_value import as_reward
from areal_lite.config.generation import GenerationHyperparameters
from areal_lite.config.rollout_config import InferenceEngineConfig
from areal_lite.data.vision.image_encoder import image_encoder


class ArealOpenAI(AsyncOpenAI):
    """An AsyncOpenAI client over one session of an inference engine.

    ``chat.completions.create`` takes what the SDK takes; ``model`` may be left out, and the workflow's
    temperature, top_p and top_k apply. Make one client per episode.

    Args:
        engine: Generates the answers.
        tokenizer: A Hugging Face tokenizer with a chat template.
        gconfig: Sampling parameters that a call does not set.
        engine_max_tokens: Maximum tokens of prompt and answer together; None is ``gconfig.max_tokens``.
        tool_call_parser: A name of ``rollout.agents.tool_parser``; None and other names are the run's.
        reasoning_parser: "think" moves reasoning into ``reasoning_content``; else it stays in the content, as in AReaL.
        chat_template_type: Ignored: a continued conversation is always one sequence.
        tools_in_system_prompt: For chat templates that do not render tools; None is the run's.
        prompt_ids: Tokens of the first request, in place of its rendered messages: ``raw_prompt_ids`` of the row.
        **client_options: Other options of AsyncOpenAI.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        tokenizer: Any,
        gconfig: GenerationHyperparameters | None = None,
        *,
        engine_max_tokens: int | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template_type: str | None = None,
        tools_in_system_prompt: bool | None = None,
        prompt_ids: list[int] | None = None,
        **client_options: Any,
    ) -> None:
        gconfig = gconfig or GenerationHyperparameters()
        if engine_max_tokens is not None:
            gconfig = gconfig.new(max_tokens=engine_max_tokens)
        config = getattr(engine, "config", None) or InferenceEngineConfig()
        in_prompt = config.agents.tools_in_system_prompt if tools_in_system_prompt is None else tools_in_system_prompt
        path = config.tokenizer_path
        renderer = chat_renderer(
            tokenizer,
            tool_parser=tool_call_parser if tool_call_parser in TOOL_FORMATS else config.agents.tool_parser,
            reasoning_parser="think" if reasoning_parser == "think" else "none",
            tools_in_system_prompt=in_prompt,
            images=None if path is None else image_encoder(path, tokenizer, config.run_dir),
        )
        self.engine = engine
        self.session = ChatSession(engine, renderer, gconfig, agent_samples=True, prompt_ids=prompt_ids)
        self._discounted = self._exported = False
        service = AgentService()
        options = {"base_url": BASE_URL, "api_key": service.open(self.session), "http_client": SharedClient(service)}
        super().__init__(**{**client_options, **options})
        completions: Any = self.chat.completions
        completions.create = partial(completions.create, model="default")

    def get_interaction(self, completion_id: str) -> InteractionWithTokenLogpReward:
        """Return the request and answer of a completion, with its tokens; KeyError if it is not one of this client's.
        ``completion`` is a ChatCompletion; of a streamed answer and of other APIs, a dict with its ``id``."""
        interaction = self._interaction(completion_id)
        if isinstance(interaction.completion, dict) and interaction.completion.get("object") == "chat.completion":
            interaction.completion = ChatCompletion.model_validate(interaction.completion)
        return interaction

    def set_reward(self, completion_id: str, reward: float) -> None:
        """Set the reward of one completion; KeyError if it is not this client's, ValueError if it is not finite."""
        self._interaction(completion_id).reward = as_reward(reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the latest completion; ValueError if there is none, or the reward is not finite."""
        self.set_reward(self._last_id(), reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> Interactions:
        """Pass rewards back to earlier turns (:func:`pass_rewards_back`), in the order of creation, across branches.

        Returns interactions by completion id. ValueError if the last turn has no reward, RuntimeError if called again.
        """
        if self._discounted:
            raise RuntimeError("apply_reward_discount was called before: a second call would discount twice")
        if self._interaction(self._last_id()).reward is None:
            raise ValueError("the last turn has no reward to pass back: call set_last_reward() first")
        self._discounted = True
        pass_rewards_back(list(self.session.interactions.values()), turn_discount)
        return dict(self.session.interactions)

    def export_interactions(self, style: Style = "individual") -> Interactions:
        """Return what ``arun_episode`` may return: sequences by completion id. "individual": each answer with a reward
        is one. "concat": each conversation is one that trains all its answers, with the reward of the last."""
        if not self._exported:
            record_counts(self.session.counts())
        self._exported = True
        sequences = self.session.history.export(style)
        if style == "concat" and len(sequences) == 1:  # then its reward is the episode's, as in AReaL
            next(iter(sequences.values())).episode_reward = None
        rewarded = {key: answer for key, answer in sequences.items() if answer.reward is not None}
        return rewarded if rewarded and style == "individual" else sequences

    def _interaction(self, completion_id: str) -> InteractionWithTokenLogpReward:
        try:
            return self.session.interactions[completion_id]
        except KeyError:
            known = list(self.session.interactions)
            raise KeyError(f"{completion_id!r} is not a completion of this client; it has {known}") from None

    def _last_id(self) -> str:
        if not self.session.interactions:
            raise ValueError("there is no completion to reward yet: call chat.completions.create() first")
        return next(reversed(self.session.interactions))
