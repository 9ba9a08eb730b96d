"""One captured request and answer, with its tokens and its reward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from areal_lite.api.io_struct import ModelResponse

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, kw_only=True)
class InteractionWithTokenLogpReward:
    """A chat completion that can be trained on.

    ``parent`` is the interaction whose prompt and answer are an exact token prefix of this one's
    prompt, so that the two are one sequence.
    """

    model_response: ModelResponse
    reward: float | None = None
    parent: InteractionWithTokenLogpReward | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    output_message_list: list[dict[str, Any]] = field(default_factory=list)
    completion: Any = None
    concat: bool = False
    """True if the sequence also trains the answers of all ancestors, False if only its own."""
    trained: bool = True
    """False if another sequence of the episode trains this answer."""

    def chain(self) -> list[InteractionWithTokenLogpReward]:
        """Return its ancestors and itself, oldest first."""
        chain = [self]
        while (parent := chain[-1].parent) is not None:
            chain.append(parent)
        return chain[::-1]

    def trained_chain(self) -> list[InteractionWithTokenLogpReward]:
        """Return those of :meth:`chain` whose answers this sequence trains."""
        nodes = self.chain() if self.concat else [self]
        return [node for node in nodes if node.trained]

    def to_tensor_dict(self) -> dict[str, torch.Tensor]:
        """Return this interaction as AReaL's tensor dict: ``[1, T]`` tensors and ``rewards`` ``[1]``.

        Raises:
            ValueError: If ``reward`` is None.
        """
        import torch

        if self.reward is None:
            name = getattr(self.completion, "id", None) or (self.completion or {}).get("id", "?")
            raise ValueError(
                f"the interaction {name} has no reward: call set_reward() or set_last_reward() before exporting"
            )
        response = self.model_response
        ids = response.input_tokens + response.output_tokens
        loss_mask = [0] * len(ids)
        logprobs = [0.0] * len(ids)
        versions = [-1] * len(ids)
        for node in self.trained_chain():
            answer = node.model_response
            start, end = answer.input_len, answer.input_len + answer.output_len
            loss_mask[start:end] = [1] * answer.output_len
            logprobs[start:end] = answer.output_logprobs
            versions[start:end] = answer.output_versions
        return {
            "input_ids": torch.tensor([ids], dtype=torch.int32),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.bool),
            "loss_mask": torch.tensor([loss_mask], dtype=torch.int32),
            "logprobs": torch.tensor([logprobs], dtype=torch.float32),
            "versions": torch.tensor([versions], dtype=torch.int32),
            "rewards": torch.tensor([self.reward], dtype=torch.float32),
        }
