"""One captured request and answer, with its tokens and its reward."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from areal_lite.api.io_struct import ModelResponse

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class InteractionWithTokenLogpReward:
    """A chat completion that can be trained on."""

    model_response: ModelResponse
    reward: float | None = None
    episode_reward: float | None = None
    """Reward of the whole episode, if ``reward`` is that or holds rewards of later answers; None: one answer's."""
    parent: "InteractionWithTokenLogpReward | None" = None
    """The one whose prompt and answer are an exact token prefix of this one's prompt: the two are one sequence."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    output_message_list: list[dict[str, Any]] = field(default_factory=list)
    completion: Any = None
    chat_template_type: str | None = None
    """AReaL's, ignored: tokens tell which conversation continues which."""
    concat: bool = False
    """True if the sequence also trains the answers of all ancestors, False if only its own."""
    trained: bool = True
    """False if another sequence of the episode trains this answer."""

    def chain(self) -> "list[InteractionWithTokenLogpReward]":
        """Return its ancestors and itself, oldest first."""
        chain = [self]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        return chain[::-1]

    def trained_chain(self) -> "list[InteractionWithTokenLogpReward]":
        """Return those of :meth:`chain` whose answers this sequence trains."""
        return [node for node in (self.chain() if self.concat else [self]) if node.trained]

    def columns(self) -> dict[str, Any]:
        """Return ids, loss mask, log-probs and versions of its sequence, each ``[T]``."""
        import numpy as np

        response = self.model_response
        ids = np.fromiter(response.input_tokens + response.output_tokens, np.int32)
        loss_mask, logprobs = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
        versions = np.full(len(ids), -1, np.int32)
        for node in self.trained_chain():
            answer = node.model_response
            here = slice(answer.input_len, answer.input_len + answer.output_len)
            loss_mask[here], logprobs[here], versions[here] = True, answer.output_logprobs, answer.output_versions
        return {"input_ids": ids, "loss_mask": loss_mask, "logprobs": logprobs, "versions": versions}

    def to_tensor_dict(self) -> "dict[str, torch.Tensor]":
        """Return AReaL's tensor dict: ``[1, T]`` tensors and ``rewards`` ``[1]``; ValueError if ``reward`` is None."""
        import torch

        if self.reward is None:
            name = getattr(self.completion, "id", None) or (self.completion or {}).get("id", "?")
            raise ValueError(
                f"the interaction {name} has no reward: call set_reward() or set_last_reward() before exporting"
            )
        tensors = {name: torch.from_numpy(column)[None] for name, column in self.columns().items()}
        tensors["attention_mask"] = torch.ones_like(tensors["loss_mask"])
        tensors["loss_mask"] = tensors["loss_mask"].int()
        for name, reward in (("rewards", self.reward), ("episode_rewards", self.episode_reward)):
            if reward is not None:
                tensors[name] = torch.tensor([reward], dtype=torch.float32)
        return tensors


def pass_rewards_back(turns: Sequence[InteractionWithTokenLogpReward], turn_discount: float) -> None:
    """Set ``r[i] += turn_discount * r[i + 1]``, from the last turn to the first; one without a reward counts as 0. The
    first turn's then holds all others, so it is the episode's reward."""
    following = 0.0
    for turn in reversed(turns):
        following = turn.reward = (turn.reward or 0.0) + turn_discount * following
    for turn in turns:
        turn.episode_reward = following
