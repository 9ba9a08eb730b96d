"""AReaL's cache of interactions, for workflows that call a model past the engine; ``ArealOpenAI`` keeps its own."""

from areal_lite.agents.session.chat_history import ChatHistory, Interactions, Style
from areal_lite.api.interaction import InteractionWithTokenLogpReward, pass_rewards_back
from areal_lite.api.reward_value import as_reward


class InteractionCache(dict[str, InteractionWithTokenLogpReward]):
    """Interactions by completion id, in their order."""

    _discounted = False

    def __setitem__(self, completion_id: str, interaction: InteractionWithTokenLogpReward) -> None:
        """Add an interaction. Its parent is the one with the most tokens whose prompt and answer begin its prompt."""
        prompt = interaction.model_response.input_tokens
        known = [(one.model_response.input_tokens + one.model_response.output_tokens, one) for one in self.values()]
        begun = [(len(ids), one) for ids, one in known if ids and prompt[: len(ids)] == ids]
        interaction.parent = max(begun, key=lambda each: each[0], default=(0, None))[1]
        super().__setitem__(completion_id, interaction)

    @property
    def last_interaction_id(self) -> str:
        """Id of the newest one; ValueError if there is none."""
        if not self:
            raise ValueError("the cache has no interaction to reward: add one first")
        return next(reversed(self))

    @property
    def total_reward(self) -> float:
        """Sum of the rewards."""
        return sum(interaction.reward or 0.0 for interaction in self.values())

    def set_reward(self, interaction_id: str, reward: float) -> None:
        """Set a reward; KeyError for an unknown id, ValueError if it is not finite."""
        self[interaction_id].reward = as_reward(reward)

    def set_last_reward(self, reward: float) -> None:
        """Set the reward of the newest one."""
        self.set_reward(self.last_interaction_id, reward)

    def apply_reward_discount(self, turn_discount: float = 1.0) -> Interactions:
        """Pass rewards back to earlier turns (:func:`pass_rewards_back`) and return all; RuntimeError a second time."""
        if self._discounted:
            raise RuntimeError("apply_reward_discount was called before: a second call would discount twice")
        self._discounted = True
        pass_rewards_back(list(self.values()), turn_discount)
        return dict(self)

    def export_interactions(self, style: Style, reward_discount: float | None = None) -> Interactions:
        """Return what ``arun_episode`` may return, as ``ArealOpenAI``; ``reward_discount`` discounts first, once."""
        if reward_discount is not None and not self._discounted:
            self.apply_reward_discount(reward_discount)
        history = ChatHistory()
        history.interactions = dict(self)
        sequences = history.export(style)
        rewarded = {key: one for key, one in sequences.items() if one.reward is not None}
        return rewarded if rewarded and style == "individual" else sequences
